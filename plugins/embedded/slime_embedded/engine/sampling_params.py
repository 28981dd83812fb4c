"""A request's `sampling_params` mapping (SGLang's keys) -> checked `SamplingParams`.

The core calls `SamplingParams.parse` for every request. A key that means nothing here is an error, never ignored;
a key set to None means its default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from slime_core.errors import EngineError, did_you_mean

GREEDY_BELOW = 1e-6
"""SGLang's bound: dividing by less overflows float32."""
LONGEST_CONSTRAINT = 1 << 16
"""Characters of a JSON schema or a regular expression."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples; names and defaults are SGLang's."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    """Stop and EOS tokens cannot be sampled before this many tokens."""
    temperature: float = 1.0
    """0 is greedy, and so is anything below `GREEDY_BELOW`."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 is off."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    """Keep the stop string or token in the text (token ids always keep it)."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    sampling_seed: int | None = None
    """A request's tokens depend on this and its logits only; None draws one from the engine's seed."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    json_schema: str | None = None
    """The answer is JSON of this schema (`constraints.py`)."""
    regex: str | None = None
    """The answer matches this expression."""

    @property
    def greedy(self) -> bool:
        """Take the most likely token."""
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """True when top-p, top-k or min-p cut the distribution."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def constrained(self) -> bool:
        """True when a grammar says which tokens may come."""
        return self.json_schema is not None or self.regex is not None

    @property
    def penalised(self) -> bool:
        """True when a penalty changes the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> SamplingParams:
        """Check names, types and ranges. Raises EngineError."""
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in raw.items():
            if key not in known:
                hint = did_you_mean(str(key), known, form="{!r}", most=3) or f" Known: {', '.join(sorted(known))}."
                raise EngineError(f"sampling_params: unknown key {key!r}.{hint}")
            if value is not None:
                values[key] = _CONVERT[key](key, value)
        params = cls(**values)
        params._check_ranges()
        return params

    def _check_ranges(self) -> None:
        rules = (
            (self.max_new_tokens >= 0, "max_new_tokens", "an integer >= 0"),
            (0 <= self.min_new_tokens <= self.max_new_tokens, "min_new_tokens", "an integer in [0, max_new_tokens]"),
            (0 <= self.temperature < math.inf, "temperature", "a number >= 0"),
            (0 < self.top_p <= 1, "top_p", "a number in (0, 1]"),
            (self.top_k == -1 or self.top_k >= 1, "top_k", "-1 (off) or an integer >= 1"),
            (0 <= self.min_p <= 1, "min_p", "a number in [0, 1]"),
            (0 < self.repetition_penalty <= 100, "repetition_penalty", "a number in (0, 100]"),
            (-2 <= self.presence_penalty <= 2, "presence_penalty", "a number in [-2, 2]"),
            (-2 <= self.frequency_penalty <= 2, "frequency_penalty", "a number in [-2, 2]"),
            (self.n >= 1, "n", "an integer >= 1"),
            (self.json_schema is None or self.regex is None, "regex", "null beside json_schema"),
            (len(self.stop) <= 64 and len("".join(self.stop)) <= 4096, "stop", "64 strings, 4096 characters in all"),
            (len(self.stop_token_ids) <= 1024, "stop_token_ids", "1024 ids"),
        )
        for ok, key, allowed in rules:
            if not ok:
                raise EngineError(f"sampling_params: {key} is {getattr(self, key)!r:.80}; allowed: {allowed}")


def _integer(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        if isinstance(value, float) and value.is_integer():
            return int(value)
        raise EngineError(f"sampling_params: {key} is {value!r}; allowed: an integer")
    return value


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise EngineError(f"sampling_params: {key} is {value!r}; allowed: a number")
    return float(value)


def _boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise EngineError(f"sampling_params: {key} is {value!r}; allowed: true or false")
    return value


def _strings(key: str, value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise EngineError(f"sampling_params: {key} is {value!r}; allowed: a string or a list of strings")
    return tuple(item for item in items if item)


def _integers(key: str, value: Any) -> tuple[int, ...]:
    items = [value] if isinstance(value, int) else value
    if not isinstance(items, list | tuple | set):
        raise EngineError(f"sampling_params: {key} is {value!r}; allowed: a list of token ids")
    return tuple(_integer(key, item) for item in items)


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_CONSTRAINT:
        allowed = f"text of up to {LONGEST_CONSTRAINT} characters"
        raise EngineError(f"sampling_params: {key} is {str(value)[:80]!r}; allowed: {allowed}")
    return value


_BY_TYPE = {
    "str | None": _text,
    "int": _integer,
    "int | None": _integer,
    "float": _number,
    "bool": _boolean,
    "tuple[str, ...]": _strings,
    "tuple[int, ...]": _integers,
}
_CONVERT = {f.name: _BY_TYPE[str(f.type)] for f in fields(SamplingParams)}
