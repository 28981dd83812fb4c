"""The fields that OpenAI's endpoints share, and their names among SGLang's sampling parameters."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from slime_serving.front.wanted import Wanted, response_format
from slime_serving.http.bodies import NOTHING, Body, Stops

MOST_CHOICES = 128
_NAMES = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}
_AS_THEY_ARE = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "stop_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim", "json_schema", "regex",
)  # fmt: skip


def api_name(parameter: str) -> str:
    """Return the name of one of SGLang's sampling parameters in OpenAI's APIs."""
    return next((theirs for theirs, ours in _NAMES.items() if ours == parameter), parameter)


class StreamOptions(Body):
    """The request field `stream_options`."""

    include_usage: bool = False
    no_effect = frozenset({"include_obfuscation"})


Ids = Annotated[list[int], Field(max_length=1024)]


class SamplingBody(Body):
    """The fields that `/v1/chat/completions` and `/v1/completions` share."""

    model: str = ""
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    stop: Stops = []
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[str, float] = {}
    response_format: dict[str, Any] | None = None
    json_schema: str | None = None
    regex: str | None = None
    rid: str | None = None
    user: str | None = None
    metadata: dict[str, Any] = {}

    no_effect = frozenset({
        "session_id", "log_metrics", "priority", "extra_key", "cache_salt", "custom_labels", "routing_key",
        "routed_dp_rank", "data_parallel_rank", "return_cached_tokens_details", "return_spec_tokens_details",
    })  # fmt: skip
    only = dict.fromkeys((
        "return_hidden_states", "return_routed_experts", "routed_experts_start_len", "return_token_ids",
        "return_prompt_token_ids", "return_meta_info", "stop_regex", "ebnf", "lora_path", "session_params",
        "custom_params", "custom_logit_processor", "bootstrap_host", "bootstrap_port", "bootstrap_room",
        "use_audio_in_video",
    ), NOTHING)  # fmt: skip

    def wanted(self, *, max_tokens: int | None) -> Wanted:
        """Return the request that these fields describe. Raises BadRequest."""
        given = {name: getattr(self, name) for name in _AS_THEY_ARE if getattr(self, name) is not None}
        given |= {ours: getattr(self, name) for name, ours in _NAMES.items() if getattr(self, name) is not None}
        return Wanted(
            model=self.model,
            n=self.n,
            stream=self.stream,
            include_usage=self.stream_options.include_usage,
            max_tokens=max_tokens,
            stop=self.stop,
            sampling=given | response_format(self.response_format),
            rid=self.rid,
            wishes={"logit_bias": self.logit_bias} if self.logit_bias else {},
        )
