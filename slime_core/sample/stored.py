"""A sample's attributes <-> JSON values, as kept by buffers, dumps, ledgers and checkpoints.

`Sample.to_dict` and `Sample.from_dict` call this module. Extra attributes, which are not fields of a sample, are kept
as deep copies; the code that sets them must choose values that JSON can hold. The counters that an engine reports are
summed over the calls of a sample; metrics average the sums of whole samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from slime_core.multimodal import TrainInputs, inputs_to_json
from slime_core.sample import provenance
from slime_core.sample.routed_experts import RoutedExperts

_WRITERS: Mapping[str, Callable[[Any], object]] = {
    "status": lambda status: status.value,
    "spec_info": lambda info: dict(info.__dict__),
    "prefix_cache_info": lambda info: dict(info.__dict__),
    "rollout_routed_experts": lambda experts: (
        copied(experts) if isinstance(experts, list) else RoutedExperts.of(experts).to_json()
    ),
    "spans": provenance.to_json,
    "turns": lambda turns: [turn._asdict() for turn in turns],
    "multimodal_inputs": inputs_to_json,
    "multimodal_train_inputs": lambda inputs: TrainInputs.of(inputs).to_json(),
}
_NOT_JSON = {n: write for n, write in _WRITERS.items() if n not in ("status", "spec_info", "prefix_cache_info")}
"""Writers of the attributes that orjson does not write in this form by itself."""
_READERS: Mapping[str, Callable[[Any], object]] = {
    "spec_info": lambda values: SpecInfo(**values),
    "prefix_cache_info": lambda values: PrefixCacheInfo(**values),
    "rollout_routed_experts": lambda stored: stored if isinstance(stored, list) else RoutedExperts.of(stored),
    "spans": provenance.from_json,
    "turns": lambda rows: [provenance.TurnSpan(**row) for row in rows],
    "multimodal_train_inputs": TrainInputs.of,
}
_PLAIN = frozenset({str, int, float, bool, type(None), provenance.Span, provenance.TurnSpan})
"""Immutable types."""


class Attributes:
    """Base of a dataclass with slots and a `__dict__` for extra attributes, which user code may set."""

    def attributes(self) -> dict[str, Any]:
        """Return the fields and the extra attributes by name."""
        return {**{name: getattr(self, name) for name in type(self).__match_args__}, **self.__dict__}  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        clone = memo[id(self)] = object.__new__(type(self))
        for name, value in self.attributes().items():
            setattr(clone, name, value if type(value) in _PLAIN else copied(value, memo))
        return clone


def field_values(stored: Mapping[str, object]) -> dict[str, Any]:
    """Return attributes from stored values: the inverse of `plain_values`, except that the status stays text."""
    return {**stored, **{name: of(stored[name]) for name, of in _READERS.items() if stored.get(name) is not None}}


def copied(value: Any, memo: dict[int, object] | None = None) -> Any:
    """Return a deep copy; lists of numbers, most of a sample, are copied without deepcopy's call per element."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (list, dict) and _PLAIN.issuperset(map(type, value.values() if kind is dict else value)):
        return value.copy()
    if kind in (SpecInfo, PrefixCacheInfo):
        return kind(**value.__dict__)
    return copy.deepcopy(value, memo)


def plain_values(attributes: dict[str, Any], *, shared: bool = False) -> dict[str, Any]:
    """Return all attributes of a sample as JSON values. Raises ValueError for invalid images and inputs.

    With `shared`, convert in the given dict, without copies, for a caller that writes it with orjson at once.
    """
    own = attributes if shared else {n: v if n in _WRITERS else copied(v) for n, v in attributes.items()}
    writers = (_NOT_JSON if shared else _WRITERS).items()
    own.update({n: write(own[n]) for n, write in writers if type(own.get(n)) not in _PLAIN})
    return own


@dataclass
class SpecInfo:
    """Speculative decoding counters, summed over the engine calls of one sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted tokens divided by drafted tokens; 0 if no token was drafted."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens produced per verification step."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: Mapping[str, Any], response_length: int = 0) -> None:
        """Add the counters of one engine answer, by SGLang 0.5.20's names or older ones; missing counters add 0."""
        accepted, drafted = meta_info.get("spec_num_correct_drafts", 0), meta_info.get("spec_num_proposed_drafts", 0)
        self.spec_accept_token_num += int(meta_info.get("spec_accept_token_num", accepted))
        self.spec_draft_token_num += int(meta_info.get("spec_draft_token_num", drafted))
        self.spec_verify_ct += int(meta_info.get("spec_verify_ct", 0))
        self.completion_token_num += int(meta_info.get("completion_tokens", response_length))


@dataclass
class PrefixCacheInfo:
    """Prefix cache counters, summed over the engine calls of one sample."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached prompt tokens divided by all prompt tokens; 0 without prompt tokens."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add the counters of one engine answer."""
        self.cached_tokens += int(meta_info.get("cached_tokens", 0))
        self.total_prompt_tokens += int(meta_info.get("prompt_tokens", 0))
