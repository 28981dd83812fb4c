"""Teacher log-probs from an engine, elsewhere or of this run: the reward asks for them, and is itself 0.

`--use-opd --opd-type sglang` reads `sample.teacher_log_probs`, which this sets from SGLang's `POST /generate` with
`max_new_tokens` 0, `return_logprob` and `logprob_start_len` 0, at `--rollout-temperature`, as the actor is scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from slime_engine_sglang import get_model_url, planned_models

from slime_core import Args, Source
from slime_core.errors import ConfigError, PluginError
from slime_core.sample import Sample
from slime_rewards.remote import JsonClient

MODEL = "teacher"
"""Name of the model in --sglang-config that is asked where --rm-url names none."""
ATTEMPTS = 4
"""Requests made before the sample fails; refused connections and 5xx answers are repeated, --rm-timeout bounds all."""
CONNECTIONS = 256
"""Requests at a time; the teacher batches them."""


class TeacherLogProbs:
    """Reward 0.0 for every sample, whose `teacher_log_probs` are set on the way.

    Evaluation asks no teacher; name a reward of its own for every evaluation data set.

    Args:
        args: `rm_url` is the teacher's address, with or without `/generate`; without one, `sglang_config` has a model
            named "teacher".

    Raises:
        ConfigError: There is neither.
    """

    def __init__(self, args: Args) -> None:
        self._given: str | None = None
        if args.rm_url:
            url = str(args.rm_url)
            self._given = url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/generate"
        elif MODEL not in planned_models(args):
            raise ConfigError(
                "reward 'on_policy_distillation' needs --rm-url URL, an engine with SGLang's /generate, or a model"
                f" named {MODEL!r} in the file of --sglang-config"
            )
        self._client = JsonClient(connections=CONNECTIONS, attempts=ATTEMPTS)

    async def __call__(self, args: Args, sample: Sample, evaluation: bool = False) -> float:
        """Set the sample's teacher log-probs.

        Raises:
            PluginError: The teacher refused, could not be reached, or scored other tokens than the sample's.
        EngineError: It is a model of this run, whose engine serves none.
        """
        if sample.response_length and not evaluation:
            sample.teacher_log_probs = teacher_log_probs(await self._ask(args, sample.tokens), sample)
        return 0.0

    async def _ask(self, args: Args, tokens: Sequence[int]) -> Any:
        body = {
            "input_ids": list(tokens),
            "sampling_params": {
                "temperature": args.rollout_temperature,
                "max_new_tokens": 0,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        return await self._client.post(self._given or get_model_url(args, MODEL), body)


def post_process_rewards(args: Args, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """THUDM/slime's second half, for rewards that return the engine's answer itself.

    Sets `teacher_log_probs` from the answers in `sample.reward`; both the raw and the shaped rewards are 0.0.

    Raises:
        PluginError: A sample has neither an answer nor teacher log-probs.
    """
    for sample in (sample for sample in samples if sample.response_length):
        if isinstance(sample.reward, Mapping):
            sample.teacher_log_probs = teacher_log_probs(sample.reward, sample)
        elif sample.teacher_log_probs is None:
            raise PluginError(
                f"sample {sample.index} has no teacher log-probs; type --custom-rm-path on_policy_distillation"
            )
    return [0.0] * len(samples), [0.0] * len(samples)


def teacher_log_probs(answer: Mapping[str, Any], sample: Sample) -> list[float]:
    """[response_length] from SGLang's answer: entries [log-prob, token, text], the first token's log-prob being null.

    0.0 where the policy did not sample (tools' answers, template): the teacher is asked about what it may have said.

    Raises:
        PluginError: The answer does not score the response's tokens.
    """
    try:
        entries = answer["meta_info"]["input_token_logprobs"][1:][-sample.response_length :]
        tokens = [int(entry[1]) for entry in entries]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PluginError(f"the teacher's answer has no usable meta_info.input_token_logprobs: {error!r}") from error
    if tokens != sample.response_tokens:
        raise PluginError(
            f"the teacher scored {len(tokens)} tokens {tokens[:8]}..., not the {sample.response_length} of the response"
            f" {sample.response_tokens[:8]}...; teacher and actor must share a tokenizer"
        )
    try:
        return [float(e[0]) if was_sampled else 0.0 for e, was_sampled in zip(entries, _sampled(sample), strict=True)]
    except (TypeError, ValueError) as error:
        raise PluginError(f"the teacher's answer has no log-prob of a sampled token: {error!r}") from error


def _sampled(sample: Sample) -> list[bool]:
    """[response_length] whether the policy sampled it."""
    spans = sample.known_spans()
    return [span.source == Source.SAMPLED for span in spans for _ in range(span.length)][-sample.response_length :]
