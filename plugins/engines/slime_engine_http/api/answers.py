"""Convert SGLang's answer object, or the pieces of a stream, to a `GenerationOutput`.

`client` calls it; `Sample.append_response_tokens` reads the `meta_info` made here. Each piece of a stream holds the
whole output so far, unless the server runs with `--incremental-streaming-output`. `completion_tokens` always counts the
whole output, so it shows which of the two applies. `routed_experts` stay SGLang's base64 until the sample reads them,
because only the sample knows how many tokens they cover. With a sampling mask, log-probs are those of the softmax over
the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import orjson

from slime_core.errors import EngineError
from slime_core.sample import GenerationOutput
from slime_engine_http.api.transport import engine_error, expecting

ADAPTER = "slime-adapter"
"""Servers' name of the shared adapter of the last update; `ADAPTER.NAME` is one of `--lora-adapters`."""
MASK = "output_token_sampling_mask"
"""Key of `meta_info`: for each token the ids that sampling could choose."""


class Reader(Protocol):
    """Reads the answer to one request, or the pieces of a stream."""

    def add(self, body: Any) -> GenerationOutput:
        """Add a piece and return the output so far. Raises EngineError if the body is not a piece."""


class Wire:
    """The form of requests for tokens and of their answers: SGLang's; another kind of server has a subclass."""

    path = "/generate"

    def __init__(self, adapters: Callable[[], Sequence[str] | None] = lambda: None) -> None:
        """Set the function that returns the adapters that servers have.

        They are the names besides the shared adapter, or None where requests go to the model itself.
        """
        self._adapters = adapters

    def adapter_of(self, body: Mapping[str, Any]) -> str | None:
        """Return the servers' name of the adapter that SGLang's body asks for; None for the model itself.

        Raises EngineError for an adapter that servers do not have.
        """
        adapter, known = body.get("lora_path"), self._adapters()
        if adapter is not None and adapter not in (known or ()):
            raise EngineError(f"adapter {adapter!r} is not served; servers have: {' '.join(known or ()) or 'none'}")
        if known is None:
            return None
        return ADAPTER if adapter is None else f"{ADAPTER}.{adapter}"

    def check(self, params: Mapping[str, Any]) -> None:
        """Raise EngineError if the servers do not support sampling parameters that are valid for SGLang."""

    def request(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the body to send for SGLang's. Raises EngineError as `adapter_of`."""
        adapter = self.adapter_of(body)
        return body if adapter is None else {**body, "lora_path": adapter}

    def reader(self, url: str, body: Mapping[str, Any]) -> Reader:
        """Return a reader of the answer from the server `url` to SGLang's `body`."""
        return Pieces(url)


class Pieces:
    """Join the pieces of a stream."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ids: list[int] = []
        self._log_probs: list[float] = []
        self._text = ""
        self._kept: list[list[int]] = []

    def add(self, body: Any) -> GenerationOutput:
        """Add a piece and return the output so far. Raises EngineError if the body is not a piece of SGLang's."""
        with expecting("tokens with log-probs in meta_info", f"{self._url}/generate", body):
            meta = dict(body["meta_info"])
            entries = meta.pop("output_token_logprobs", None)
            if entries is None and meta.get("completion_tokens") != 0:  # not aborted before its first token
                raise KeyError("output_token_logprobs")
            meta.pop("input_token_logprobs", None)
            # Same as float() and int() at half the cost; a value that is not a number also raises.
            log_probs = [entry[0] * 1.0 for entry in entries or ()]
            ids = [entry[1] | 0 for entry in entries or ()]
            kept, over_kept = meta.pop(MASK, None), meta.pop("output_token_sampling_logprobs", None)
            if kept is not None:
                log_probs = list(map(float, over_kept))
                if not len(kept) == len(log_probs) == len(ids):
                    raise ValueError(f"{len(kept)} sampling masks and {len(log_probs)} log-probs")
            text = str(body.get("text") or "")
            total = int(meta.get("completion_tokens", len(ids)))
            if "token_weight_versions" not in meta and (meta.get("weight_version") or meta.get("weight_versions")):
                meta["token_weight_versions"] = token_weight_versions(meta, total)
            if total not in (len(ids), len(self._ids) + len(ids)):
                raise ValueError(f"{len(ids)} tokens, and completion_tokens {total}")
        if total == len(ids):
            self._ids, self._log_probs, self._text, self._kept = ids, log_probs, text, kept or []
        else:
            self._ids, self._log_probs = self._ids + ids, self._log_probs + log_probs
            self._text, self._kept = self._text + text, self._kept + (kept or [])
        if kept is not None:
            meta[MASK] = self._kept
        return GenerationOutput(self._ids, self._log_probs, self._text, meta)


def event_of(raw: bytes, url: str) -> dict[str, Any]:
    """Parse an event of a stream. Raises EngineError if it reports an error or is not a JSON object."""
    try:
        chunk = orjson.loads(raw)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        shown = raw[:200].decode(errors="replace")
        raise engine_error(f"{url}/generate", f"not an answer of SGLang's API: {shown!r}", 200)
    if "error" in chunk:
        error = chunk["error"] if isinstance(chunk["error"], Mapping) else {"message": chunk["error"]}
        status = error["code"] if isinstance(error.get("code"), int) else 400
        raise engine_error(f"{url}/generate", str(error.get("message", error)), status)
    return chunk


def token_weight_versions(meta: Mapping[str, Any], num_tokens: int) -> list[int]:
    """Return [num_tokens] weight versions, one per token; 0 for a name that is not a number (SGLang's "default")."""
    spans = meta.get("weight_versions")
    if not spans:
        return [_number(meta.get("weight_version"))] * num_tokens
    versions: list[int] = []
    for span in spans:
        versions += [_number(span["version"])] * (min(int(span["end"]), num_tokens) - len(versions))
    return versions + [_number(spans[-1]["version"])] * (num_tokens - len(versions))


def versions_in(meta: Mapping[str, Any]) -> set[str]:
    """Return the names of all weight versions used for the answer; empty if the server names no version."""
    ours = meta.get("token_weight_versions")
    if meta.get("weight_versions"):
        return {str(span["version"]) for span in meta["weight_versions"]}
    named = set() if meta.get("weight_version") is None else {str(meta["weight_version"])}
    return named | {str(version) for version in ours} if ours and len(set(ours)) > 1 else named


def is_all_of(meta: Mapping[str, Any], version: int) -> bool:
    """Return whether every token has this weight version; a fast check for the usual case before `versions_in`."""
    ours = meta.get("token_weight_versions")
    return (
        meta.get("weight_version") == str(version)
        and not meta.get("weight_versions")
        and (not ours or ours.count(version) == len(ours))
    )


def aborted_output(rid: str, prompt_tokens: int) -> GenerationOutput:
    """Return the answer to a request that was aborted before it was sent to a server."""
    meta = {
        "id": rid,
        "finish_reason": {"type": "abort", "message": "aborted before it was started"},
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 0,
        "cached_tokens": 0,
        "token_weight_versions": [],
    }
    return GenerationOutput([], [], "", meta)


def broken_off(output: GenerationOutput, problem: str) -> GenerationOutput:
    """Return the output of a broken stream as an aborted one: its tokens are valid, so it can be continued."""
    meta = output.meta_info | {"finish_reason": {"type": "abort", "message": problem}}
    return GenerationOutput(output.token_ids, output.log_probs, output.text, meta)


def _number(version: Any) -> int:
    try:
        return int(version)
    except (TypeError, ValueError):
        return 0
