"""Token ids -> text, at the end of a request or while it runs.

The core feeds a `TextStream` when a request has stop strings or is streamed; others are decoded once, at the end.
A token may be a part of a character, so a stream holds text back until it is complete.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from slime_core.engines.embedded.sampling_params import SamplingParams

_INCOMPLETE = "\ufffd"


def decode(tokenizer: Any, ids: Seq[int], params: SamplingParams) -> str:
    """The text of `ids`; empty without a tokenizer."""
    if tokenizer is None or not ids:
        return ""
    text: str = tokenizer.decode(
        list(ids),
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        clean_up_tokenization_spaces=False,
    )
    return text


class TextStream:
    """Text of a growing list of ids. Decodes a short tail per token: what was complete before gives the context."""

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._context = 0
        self._read = 0
        self._longest_stop = max((len(s) for s in params.stop), default=0)
        self.text = ""
        """Complete characters so far."""
        self.stop_at: int | None = None
        """Where in `text` a stop string begins."""

    def update(self, ids: Seq[int], final: bool = False) -> str | None:
        """Take all output ids so far; the stop string that appeared first, or None. `final` releases held-back text."""
        before = decode(self._tokenizer, ids[self._context : self._read], self._params)
        tail = decode(self._tokenizer, ids[self._context :], self._params)
        if len(tail) <= len(before) or (tail.endswith(_INCOMPLETE) and not final):
            return None
        self.text += tail[len(before) :]
        self._context, self._read = self._read, len(ids)
        return self._find_stop(len(tail) - len(before))

    @property
    def safe_text(self) -> str:
        """`text` without an ending that may turn out to be the beginning of a stop string."""
        held = max(
            (n for stop in self._params.stop for n in range(1, len(stop)) if self.text.endswith(stop[:n])), default=0
        )
        return self.text[: len(self.text) - held]

    def _find_stop(self, new: int) -> str | None:
        start = max(0, len(self.text) - new - self._longest_stop)
        found = [(self.text.find(stop, start), stop) for stop in self._params.stop]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if not hits:
            return None
        self.stop_at, stop = min(hits)
        return stop
