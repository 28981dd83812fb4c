"""The experts to which an engine routed each token of a sample: compact, merged over calls, stored as JSON.

`Sample.append_response_tokens` merges the experts that each engine call reports; the trainer replays them. Standard
library only; `numpy.asarray` reads the numbers without a copy. Row p belongs to the forward pass whose *input* was
token p and which predicted token p + 1. So a sample of n tokens has n - 1 rows, and the first response token's log-prob
comes from the row of the last prompt token.
"""

from __future__ import annotations

import base64
import binascii
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.multimodal import TrainInputs

if TYPE_CHECKING:
    from slime_core.protocols import Args

FREE = -1
"""Placeholder for every expert number of a token with unknown routing, which the trainer's router decides."""


class RoutedExperts:
    """Expert numbers [rows, layers, top_k], int32; the numbers of a dense layer have no meaning."""

    def __init__(self, shape: Sequence[int], data: array[int]) -> None:
        rows, layers, top_k = shape
        if len(data) != rows * layers * top_k:
            raise ValueError(f"routed experts of shape {tuple(shape)} have {len(data)} numbers")
        self.shape = (rows, layers, top_k)
        self._data = data

    @classmethod
    def of(cls, value: Any) -> RoutedExperts:
        """Build from an array, nested lists, or the JSON form.

        Raises:
            ValueError: `value` has another form.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls([int(n) for n in value["shape"]], _decoded(value["base64"]))
        if hasattr(value, "astype") and hasattr(value, "tobytes"):  # a numpy array or an object with its interface
            if len(value.shape) != 3:
                raise ValueError(f"routed experts have shape {tuple(value.shape)}; expected [tokens, layers, top_k]")
            numbers = array("i")
            numbers.frombytes(value.astype("int32").tobytes())
            return cls(value.shape, numbers)
        if hasattr(value, "tolist"):
            value = value.tolist()
        try:
            rows, width, top_k = len(value), len(value[0]), len(value[0][0])
            data = array("i", (int(e) for row in value for layer in row for e in layer))
        except (TypeError, IndexError) as error:
            raise ValueError("routed experts must be [tokens, layers, top_k] integers") from error
        return cls((rows, width, top_k), data)

    @classmethod
    def of_base64(cls, text: str, rows: int, layers: int) -> RoutedExperts:
        """Decode SGLang's `meta_info["routed_experts"]`. Raises ValueError if its size does not fit rows and layers."""
        data = _decoded(text)
        if rows < 1 or layers < 1 or not data or len(data) % (rows * layers):
            raise ValueError(f"routed_experts hold {len(data)} numbers, which are not {rows} tokens x {layers} layers")
        return cls((rows, layers, len(data) // (rows * layers)), data)

    @classmethod
    def free(cls, rows: int, layers: int, top_k: int) -> RoutedExperts:
        """Return rows with unknown routing."""
        return cls((rows, layers, top_k), array("i", [FREE]) * (rows * layers * top_k))

    def __len__(self) -> int:
        return self.shape[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoutedExperts) and (self.shape, self._data) == (other.shape, other._data)

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, row: int) -> list[list[int]]:
        """Return the experts of one token, [layers][top_k]."""
        _, layers, top_k = self.shape
        row = range(len(self))[row]
        flat = self._data[row * layers * top_k : (row + 1) * layers * top_k].tolist()
        return [flat[i : i + top_k] for i in range(0, len(flat), top_k)]

    def __repr__(self) -> str:
        return f"RoutedExperts(shape={self.shape}, known={self.num_known()})"

    @property
    def __array_interface__(self) -> dict[str, object]:
        byte_order = "<" if sys.byteorder == "little" else ">"
        return {"version": 3, "shape": self.shape, "typestr": f"{byte_order}i4", "data": memoryview(self._data)}

    def num_known(self) -> int:
        """Return the number of rows with known routing."""
        step = self.shape[1] * self.shape[2]
        return sum(self._data[i] != FREE for i in range(0, len(self._data), step)) if step else 0

    def extended(self, rows: int) -> RoutedExperts:
        """Return a copy with `rows` rows: unknown rows are appended, or rows are cut off."""
        step = self.shape[1] * self.shape[2]
        data = self._data[: rows * step] + array("i", [FREE]) * max(0, (rows - len(self)) * step)
        return RoutedExperts((rows, *self.shape[1:]), data)

    def filled(self, later: RoutedExperts, start: int) -> RoutedExperts:
        """Return a copy whose unknown rows are taken from `later`, whose first row is row `start` here.

        Known rows stay, because the log-probs of their tokens were computed with them. Raises ValueError if `later`
        comes from another model.
        """
        if later.shape[1:] != self.shape[1:]:
            raise ValueError(f"routed experts of {later.shape[1:]} (layers, top_k) after some of {self.shape[1:]}")
        result = self.extended(max(len(self), start + len(later)))
        step, data = self.shape[1] * self.shape[2], result._data
        for row in range(start, start + len(later)):
            if data[row * step] == FREE:
                at = (row - start) * step
                data[row * step : (row + 1) * step] = later._data[at : at + step]
        return result

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form that `of` reads."""
        return {"shape": list(self.shape), "base64": base64.b64encode(self._data.tobytes()).decode()}


def json_default(value: object) -> object:
    """Convert a `RoutedExperts`, a `TrainInputs` or a named tuple for a JSON writer. Raises TypeError for others."""
    if isinstance(value, RoutedExperts | TrainInputs):
        return value.to_json()
    if isinstance(value, tuple):
        return list(value)
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def routed_experts_after_call(
    known: Any, meta_info: Mapping[str, Any], num_tokens: int, args: Args | None
) -> RoutedExperts | None:
    """Return a sample's routed experts after tokens were appended.

    Args:
        known: The routed experts before, in any form that `RoutedExperts.of` reads, or None.
        meta_info: The engine's metadata; `routed_experts` covers all tokens but the last, starting at
            `routed_experts_start_len` (default 0). Empty for tokens that no engine generated.
        num_tokens: Number of tokens of the sample now.
        args: The settings; `hf_checkpoint` gives the number of layers for SGLang's base64.

    Raises:
        ValueError: The routed experts do not fit the tokens.
    """
    rows = num_tokens - 1
    before = None if known is None else RoutedExperts.of(known).extended(rows)
    value = meta_info.get("routed_experts")
    if value is None:
        return before
    start = int(meta_info.get("routed_experts_start_len") or 0)
    if isinstance(value, str):
        found = RoutedExperts.of_base64(value, rows - start, _num_layers(args.hf_checkpoint if args else ""))
    else:
        found = RoutedExperts.of(value)
    if start + len(found) != rows:
        raise ValueError(
            f"routed_experts have {len(found)} rows from token {start} on; {num_tokens} tokens need {rows - start}"
        )
    return (RoutedExperts.free(rows, *found.shape[1:]) if before is None else before).filled(found, start)


@lru_cache
def _num_layers(checkpoint: str) -> int:
    try:
        return int(json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"routed_experts in base64 need num_hidden_layers of {checkpoint}/config.json") from error


def _decoded(text: str) -> array[int]:
    data = array("i")
    try:
        data.frombytes(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"routed experts are not base64 of int32: {error}") from error
    return data
