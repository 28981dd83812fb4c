"""Load this rank's parameters from HF safetensors, reading only the needed parts.

The trainer calls it for `--hf-checkpoint`, `--ref-load` and similar settings. The shapes of all tensors are compared
before the first tensor is read, so a checkpoint that does not fit changes nothing. Optimizers with float32 copies of
16-bit parameters do not see loaded values: load first, or make them read the parameters again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slime_core.errors import CheckpointError, ConfigError
from slime_core.models.config import read_hf_config
from slime_core.models.hf_io import weight_files
from slime_trainer_megatron.families.family import MegatronModel, places
from slime_trainer_megatron.weights.parameters import NamedParameter, checked_parameters, gathered, part_of

SCALE = "_scale_inv"
"""Suffix of the scales of a block-quantised tensor: `weight` and `weight_scale_inv` (DeepSeek's layout)."""
_SHOWN = 20


def load_hf(
    chunks: Sequence[Any],
    model: MegatronModel,
    directory: str | Path,
    *,
    missing_ok: Callable[[str], bool] = lambda name: False,
) -> list[str]:
    """Fill the parameters of this rank's chunks. Every rank calls it.

    Args:
        chunks: The model of this rank, one per virtual pipeline stage; wrapped or not.
        model: The family's map; for a critic, `weight_map.critic_of` the map.
        directory: Directory in HF's layout: safetensors, one file or an index.
        missing_ok: HF names that may be missing or have another shape (a critic's head); their parameters stay
            unchanged.

    Returns:
        The HF names of this rank's parameters that were missing and allowed to be.

    Raises:
        CheckpointError: Tensors are missing, have another shape, or have no place; the message names all of them. If
            one rank fails, every rank raises.
        ConfigError: The map does not fit the model, or the files cannot be read.
    """
    with opened(directory) as source:
        plan, absent, problems = _plan(checked_parameters(chunks, model), model, source, missing_ok)
        problems += _without_a_place(model, source)
        if found := list(dict.fromkeys(text for texts in gathered(problems) for text in texts)):
            more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise CheckpointError(
                f"{directory}: {len(found)} tensors do not fit the model:\n  " + "\n  ".join(found[:_SHOWN]) + more
            )
        with torch.no_grad():
            for parameter in plan:
                parameter.parameter.copy_(_value(parameter, source))
    return absent


class HfTensors:
    """The tensors of a directory by name, valid while `opened` keeps the files open."""

    def __init__(self, directory: Path, files: Mapping[str, Any]) -> None:
        self.directory = directory
        self.files = files
        self._block: tuple[int, int] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return tuple(self.files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the dtype by its safetensors name."""
        return str(self.files[name].get_slice(name).get_dtype())

    def whole(self, name: str) -> torch.Tensor:
        """Return the tensor; a block-quantised tensor is converted to float32."""
        tensor: torch.Tensor = self.files[name].get_tensor(name)
        if name + SCALE not in self:
            return tensor
        scale: torch.Tensor = self.files[name + SCALE].get_tensor(name + SCALE)
        return dequantized(tensor, scale, self.block)

    def part(self, name: str, axis: int, start: int, length: int) -> torch.Tensor:
        """Return `length` rows (axis 0) or columns (axis 1) from `start`."""
        if name + SCALE in self:
            return self.whole(name).narrow(axis, start, length)
        view = self.files[name].get_slice(name)
        found: torch.Tensor = view[start : start + length] if axis == 0 else view[:, start : start + length]
        return found

    @property
    def block(self) -> tuple[int, int]:
        """Return the numbers of rows and columns that share a scale."""
        if self._block is None:
            quantization = read_hf_config(self.directory).get("quantization_config") or {}
            rows, columns = quantization.get("weight_block_size") or (128, 128)
            self._block = (int(rows), int(columns))
        return self._block


def dequantized(tensor: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return block-quantised weights as float32: every block of the tensor times its scale.

    Args:
        tensor: [rows, columns], float8.
        scale: [ceil(rows / block rows), ceil(columns / block columns)], float32.
        block: Rows and columns that share a scale.

    Source: the DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3.
    """
    rows, columns = tensor.shape
    spread = scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return tensor.float() * spread


@contextmanager
def opened(directory: str | Path) -> Iterator[HfTensors]:
    """Open a directory's files, memory-mapped, until every tensor is read. Raises ConfigError."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in weight_files(directory):
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                files |= dict.fromkeys(file.keys(), file)
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path}: cannot be read as safetensors: {error}") from error
        yield HfTensors(Path(directory), files)


def _plan(
    named: Sequence[NamedParameter], model: MegatronModel, source: HfTensors, missing_ok: Callable[[str], bool]
) -> tuple[list[NamedParameter], list[str], list[str]]:
    """Return the parameters to load, the HF names left out, and the problems."""
    plan: list[NamedParameter] = []
    absent: list[str] = []
    problems: list[str] = []
    for parameter in named:
        missing = [name for name in parameter.hf if name not in source]
        found = [] if missing else _misfit(parameter, model, source)
        if not (missing or found):
            plan.append(parameter)
        elif all(missing_ok(name) for name in missing or parameter.hf):
            absent += parameter.hf
        else:
            shape = tuple(parameter.parameter.shape)
            problems += [f"{name}: missing (for {parameter.name} {shape})" for name in missing] + found
    return plan, absent, problems


def _misfit(parameter: NamedParameter, model: MegatronModel, source: HfTensors) -> list[str]:
    """Merge tensors of the files' shapes on the meta device and compare the result with the parameter."""
    if eight_bit := [
        name for name in parameter.hf if source.dtype(name).startswith("F8") and name + SCALE not in source
    ]:
        return [f"{name}: {source.dtype(name)} without {name}{SCALE}" for name in eight_bit]
    part = part_of(parameter.row)
    expected = tuple(parameter.parameter.shape)
    shapes = [source.shape(name) for name in parameter.hf]
    if parameter.row.vocabulary:
        fits = shapes[0] == (model.architecture.vocab_size, *expected[1:]) and expected[0] * part.size >= shapes[0][0]
        merged: Any = f"vocabulary of {model.architecture.vocab_size} in rows of {tuple(expected[1:])}"
    else:
        try:
            whole = [torch.empty(shape, device="meta") for shape in shapes]
            merged = tuple(parameter.row.merge.to_megatron(whole, part.rank, part.size).shape)
            fits = merged == expected
        except (ValueError, RuntimeError, IndexError) as error:
            merged, fits = f"they do not merge ({str(error).splitlines()[0]})", False
    if fits:
        return []
    read = ", ".join(f"{name} {shape}" for name, shape in zip(parameter.hf, shapes))
    of = f"part {part.rank} of {part.size}" if part.size > 1 else "all"
    return [f"{read}: {of} gives {merged}, {parameter.name} is {expected}"]


def _without_a_place(model: MegatronModel, source: HfTensors) -> list[str]:
    """List the tensors of the files that the model does not use."""
    needed = {name for place in places(model) for name in place.hf}
    known = [re.compile(pattern) for pattern in (*model.carried, *model.ignored)]
    rest = [name for name in source.files if name not in needed and name.removesuffix(SCALE) not in needed]
    return [
        f"{name} {source.shape(name)}: in the files, not in the model"
        for name in rest
        if not any(pattern.fullmatch(name) for pattern in known)
    ]


def _value(parameter: NamedParameter, source: HfTensors) -> torch.Tensor:
    """Return this rank's part, in the dtype of the files."""
    row, part = parameter.row, part_of(parameter.row)
    if row.vocabulary:
        (name,) = parameter.hf
        length = parameter.parameter.shape[0]
        start = min(part.rank * length, source.shape(name)[0])
        stop = min(start + length, source.shape(name)[0])
        known = source.part(name, 0, start, stop - start)
        padding = known.new_zeros(length - known.shape[0], *known.shape[1:])
        return torch.cat([known, padding]) if len(padding) else known
    axis = row.merge.read_axis(part.size)
    if axis is None or part.size == 1:
        return row.merge.to_megatron([source.whole(name) for name in parameter.hf], part.rank, part.size)
    cut = []
    for name in parameter.hf:
        length = source.shape(name)[axis] // part.size
        cut.append(source.part(name, axis, part.rank * length, length))
    return row.merge.to_megatron(cut, 0, 1)
