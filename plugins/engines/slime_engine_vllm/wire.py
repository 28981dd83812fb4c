"""SGLang's request for tokens -> vLLM's (`/inference/v1/generate`), and vLLM's answer -> a `GenerationOutput`.

vLLM ignores unknown sampling parameters silently, so a parameter that it does not have is refused here. Token ids go in
and out, and the text is decoded here, from the ids. slime launches servers with `--logprobs-mode processed_logprobs`,
so the log-probs are those of the temperature-scaled distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_engine_http.api.answers import Wire, token_weight_versions
from slime_engine_http.api.transport import engine_error, expecting

from slime_core.errors import EngineError
from slime_core.sample import GenerationOutput

PREFIX = "generate-tokens-"
"""vLLM puts it before the id of a request; an abort needs the whole id."""
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "ignore_eos", "stop", "stop_token_ids", "logit_bias", "skip_special_tokens", "spaces_between_special_tokens", "n",
)  # fmt: skip
_NAMES = {name: name for name in _SAME} | {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
_STRUCTURED = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
_OURS = frozenset({"no_stop_trim"})
"""Parameters that concern the text only, which is made here."""
_KNOWN = frozenset({*_NAMES, *_STRUCTURED, *_OURS})
Decode = Callable[[Sequence[int], Mapping[str, Any]], str]
"""(token ids, sampling parameters) -> text."""


class VllmWire(Wire):
    """The form of vLLM's requests and answers."""

    path = "/inference/v1/generate"

    def __init__(self, decode: Decode, adapters: Callable[[], Sequence[str] | None] = lambda: None) -> None:
        """Set the function that makes text of token ids, and the one of `Wire`."""
        super().__init__(adapters)
        self._decode = decode

    def check(self, params: Mapping[str, Any]) -> None:
        """Raise EngineError if a parameter is SGLang's alone."""
        if params.keys() <= _KNOWN:
            return
        if odd := sorted(name for name in params.keys() - _KNOWN if params[name] is not None):
            raise EngineError(
                f"sampling_params: vLLM has no {', '.join(map(repr, odd))}, which SGLang has. Known:"
                f" {', '.join(sorted(_KNOWN))}."
            )

    def request(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return vLLM's body.

        Raises EngineError for images, routed experts and sampling masks, and for an adapter that servers do not have,
        which would end a server.
        """
        if odd := [name for name in ("image_data", "return_routed_experts", "return_sampling_mask") if body.get(name)]:
            raise EngineError(f"the vLLM engine does not send {odd[0]}")
        sent: dict[str, Any] = {
            "request_id": body["rid"],
            "token_ids": body["input_ids"],
            "sampling_params": sampling_params(body["sampling_params"]),
            "stream": bool(body.get("stream")),
        }
        if salt := body.get("extra_key"):
            sent["cache_salt"] = salt
        if (adapter := self.adapter_of(body)) is not None:
            sent["model"] = adapter
        return sent

    def reader(self, url: str, body: Mapping[str, Any]) -> VllmReader:
        """Return a reader of the answer."""
        return VllmReader(url + self.path, body, self._decode)


def sampling_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's parameters for SGLang's."""
    sent: dict[str, Any] = {"logprobs": 0, "detokenize": bool(params.get("stop"))}  # a stop string needs the text
    structured: dict[str, Any] = {}
    for name, value in params.items():
        if value is None:
            continue
        if name in _NAMES:
            sent[_NAMES[name]] = value
        elif name in _STRUCTURED:
            structured[_STRUCTURED[name]] = value
    if sent.get("top_k") == -1:
        sent["top_k"] = 0
    if sent.get("max_tokens") == 0:
        sent["max_tokens"] = 1  # vLLM refuses 0; the reader leaves the token out
    if structured:
        sent["structured_outputs"] = structured
    return sent


class VllmReader:
    """Reads the answer to one request, or the pieces of a stream, each with the tokens since the last."""

    def __init__(self, url: str, body: Mapping[str, Any], decode: Decode) -> None:
        """Store the URL with its path, SGLang's request body, and the decoder."""
        self._url, self._body, self._decode = url, body, decode
        self._limit: int | None = body["sampling_params"].get("max_new_tokens")
        self._ids: list[int] = []
        self._log_probs: list[float] = []

    def add(self, body: Any) -> GenerationOutput:
        """Add a piece and return the output so far. Raises EngineError if the body is not a piece of vLLM's."""
        with expecting("choices with token_ids and logprobs", self._url, body):
            (choice,) = body["choices"] or [{"token_ids": [], "finish_reason": None}]  # the last of a stream has usage
            ids = [token | 0 for token in choice["token_ids"] or ()]
            entries = (choice.get("logprobs") or {}).get("content") or ()
            log_probs = [entry["logprob"] * 1.0 for entry in entries]
            if [entry["token_id"] for entry in entries] != ids:
                raise ValueError(f"{len(ids)} tokens, and log-probs of others")
            if self._limit != 0:
                self._ids, self._log_probs = self._ids + ids, self._log_probs + log_probs
            meta = self._meta(body, choice)
        params = self._body["sampling_params"]
        text = self._decode(self._ids, {**params, "matched": (meta["finish_reason"] or {}).get("matched")})
        return GenerationOutput(self._ids, self._log_probs, text, meta)

    def _meta(self, body: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
        """Return SGLang's `meta_info`."""
        count, usage = len(self._ids), body.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        meta: dict[str, Any] = {
            "id": self._body["rid"],
            "finish_reason": self._finish_reason(choice),
            "prompt_tokens": len(self._body["input_ids"]),
            "completion_tokens": count,
            "cached_tokens": int(cached or 0),
        }
        if spans := choice.get("weight_versions"):
            meta["weight_version"] = str(spans[-1]["version"])
            if len(spans) > 1:
                meta["weight_versions"] = spans
            meta["token_weight_versions"] = token_weight_versions(meta, count)
        return meta

    def _finish_reason(self, choice: Mapping[str, Any]) -> dict[str, Any] | None:
        reason = choice.get("finish_reason")
        if reason is None:
            return None
        if reason == "abort":
            return {"type": "abort", "message": "aborted by the server"}
        if reason == "length" or self._limit == 0:
            return {"type": "length", "length": len(self._ids)}
        if reason != "stop":  # "error": a request that failed in the server
            raise engine_error(self._url, f"the request ended with {reason!r}", 500)
        matched = choice.get("stop_reason")
        return {"type": "stop", "matched": self._ids[-1] if matched is None and self._ids else matched}
