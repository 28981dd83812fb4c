"""LoRA in Megatron's linears: each linear gets one A and one B for all HF matrices fused in it, and a merged weight.

Built by `roles.py`; `trainer.py` exports the merged weights, `lora_checkpoint.py` reads and writes the adapters.

    linear cut over its outputs   y_r += scale * B_r gather(A x)     A whole, B cut as the linear's rows
    linear cut over its inputs    y   += scale * B sum_r(A_r x_r)    A cut as the linear's columns, B whole
    linear that is on every rank  y   += scale * B A x               both whole

Ranks exchange only `rank` numbers per token and matrix. Every matrix that is fused in a linear has its own part of A
(`rank` rows). A row of B belongs to one matrix and multiplies only that matrix's part. So B has the layout of the
linear's own merge, and equals the B of a trainer without fused linears.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from slime_embedded.models.lora import LoraSettings, first_adapter, is_projection, merged, module_of
from torch import nn
from torch.nn import functional

from slime_core.errors import ConfigError
from slime_trainer_megatron.families.family import MegatronModel, Merge, Row
from slime_trainer_megatron.families.weight_map import Rows, Whole
from slime_trainer_megatron.weights.parameters import (
    NamedParameter,
    gathered,
    named_global_parameters,
    part_of,
    unwrapped,
)

ADAPTER = "adapter"
"""Name of the module that holds an adapter, within its linear."""
DOWN, UP = "lora_A", "lora_B"
_Key = tuple[str, tuple[int, ...] | None]
"""Megatron's name of the weight, and the layers."""
Cut = Literal["outputs", "inputs", "nothing"]
"""The axis along which a linear is split over tensor-parallel ranks."""


class Adapter(nn.Module):
    """The adapter of one linear; its result is added to the linear's output.

    Args:
        down: [matrices * rank, inputs here] float32, A of every adapted matrix.
        up: [outputs here, rank] float32, B.
        matrix: [outputs here] number of the adapted matrix of each output; -1 for an output that is not adapted.
        scale: alpha / rank.
        cut: The axis along which the linear is split over ranks.
        sequence_parallel: Whether its input, or its output if split over inputs, is this rank's part of the sequence.
    """

    owners: torch.Tensor | None

    def __init__(
        self,
        down: torch.Tensor,
        up: torch.Tensor,
        matrix: torch.Tensor,
        scale: float,
        cut: Cut,
        *,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.Parameter(down), nn.Parameter(up)
        self.scale, self.cut, self.sequence_parallel = scale, cut, sequence_parallel
        self.matrices = len(down) // up.shape[1]
        owners = (matrix[:, None] == torch.arange(self.matrices, device=matrix.device)).float()
        # [outputs, matrices], 1 if the output belongs to the matrix; None if all outputs belong to one matrix.
        self.register_buffer("owners", None if bool(owners.all()) else owners, persistent=False)
        self._mark()

    def _mark(self) -> None:
        """Mark the parameters for Megatron.

        A split parameter counts in the gradient norm with every part, a copied one once. Gradients of a part of the
        sequence are summed over tensor-parallel ranks (finalize_model_grads.py).
        """
        parts = {"outputs": (None, 0), "inputs": (1, None), "nothing": (None, None)}[self.cut]
        for parameter, axis in zip((self.lora_A, self.lora_B), parts, strict=True):
            marks: Any = parameter
            if axis is not None:
                marks.tensor_model_parallel, marks.partition_dim, marks.partition_stride = True, axis, 1
            elif self.sequence_parallel:
                marks.sequence_parallel = True

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move to another device but stay float32 when the model becomes bfloat16, so that small steps add up."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(fn(tensor.new_empty(0)).device)

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]

    def _per_matrix(self) -> torch.Tensor:
        """Return B as [outputs, matrices * rank], with zeros outside the part of the output's own matrix."""
        if self.owners is None:
            return self.lora_B
        return (self.lora_B[:, None, :] * self.owners[:, :, None]).flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [sequence, batch, inputs here] to [sequence, batch, outputs here], to add to the linear's output."""
        from megatron.core import tensor_parallel as tp

        z = functional.linear(x, self.lora_A.to(x.dtype))
        if self.cut == "outputs":
            if self.sequence_parallel:
                z = tp.gather_from_sequence_parallel_region(z, tensor_parallel_output_grad=True)
            else:
                z = tp.copy_to_tensor_model_parallel_region(z)
        elif self.cut == "inputs":
            sum_up = (
                tp.reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else tp.reduce_from_tensor_model_parallel_region
            )
            z = sum_up(z)
        added: torch.Tensor = functional.linear(z, self._per_matrix().to(z.dtype)) * self.scale
        return added

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the linear's weight on this rank merged with the adapter.

        The result is a new tensor without gradient, computed in float32 and returned in the weight's dtype.
        """
        result = weight.detach().to(torch.float32, copy=True)
        down, up = self.lora_A.detach().chunk(self.matrices), self.lora_B.detach()
        for number, part in enumerate(down):
            if self.owners is None:
                result = merged(result, part, up, self.scale)
            else:
                rows = self.owners[:, number].bool()
                result[rows] = merged(result[rows], part, up[rows], self.scale)
        return result.to(weight.dtype)


def _add(module: Any, inputs: Any, output: Any) -> Any:
    """Add the adapter's result, as a forward hook of a linear that returns its output and a bias."""
    x, (y, *rest) = inputs[0], output
    return (y + getattr(module, ADAPTER)(_normed(module, x)).to(y.dtype), *rest)


def _normed(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute the norm again for Transformer Engine's linears that begin with a norm and do not expose its result."""
    scale = getattr(module, "layer_norm_weight", None)
    if scale is None:
        return x
    assert module.normalization == "RMSNorm", "models of other norms are refused when they are read"
    numbers = x.float()
    numbers = numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + module.eps)
    scaled: torch.Tensor = numbers * (scale.float() + float(module.zero_centered_gamma))
    return scaled.to(x.dtype)


@dataclass(frozen=True)
class _Downs(Merge):
    """A of the matrices of a linear, stacked, on every rank."""

    matrices: int

    def to_megatron(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """Stack several [rank, in] to [matrices * rank, in]."""
        return torch.cat(list(tensors))

    def to_hf(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Split [matrices * rank, in] into A of each matrix."""
        return list(parts[0].chunk(self.matrices))


@dataclass(frozen=True)
class _Ups(Merge):
    """B of the adapted matrices of a linear -> B in the order of the linear's outputs, with zeros for the others."""

    linear: Merge
    outputs: tuple[int, ...]
    """Number of outputs of every matrix in the linear."""
    chosen: tuple[int, ...]
    """Positions of the adapted matrices."""

    def to_megatron(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """Merge several [out, rank] to [all out / size, rank]."""
        given = dict(zip(self.chosen, tensors, strict=True))
        width = tensors[0].shape[1]
        every = [given.get(i, tensors[0].new_zeros(out, width)) for i, out in enumerate(self.outputs)]
        return self.linear.to_megatron(every, rank, size)

    def to_hf(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return B of the adapted matrices."""
        every = self.linear.to_hf(parts)
        return [every[i] for i in self.chosen]


class Adapters:
    """The adapters of one rank's model; creates and hooks them in, and freezes the rest of the model. Collective.

    Args:
        chunks: Unwrapped model chunks with the base weights.
        family: Weight map of the chunks.
        lora: Target matrices and rank.
        seed: Seed of the run.

    Raises:
        ConfigError: The targets do not fit the model, or the model bypasses its linears.
    """

    def __init__(self, chunks: Sequence[Any], family: MegatronModel, lora: LoraSettings, seed: int) -> None:
        from megatron.core import parallel_state

        config = unwrapped(chunks[0]).config
        if config.moe_shared_expert_overlap:
            raise ConfigError(
                "--moe-shared-expert-overlap with --lora-rank: the shared experts' linears then get parts of their"
                " inputs, which adapters do not see; remove it"
            )
        self.chunks, self.lora = list(chunks), lora
        parallel = bool(config.sequence_parallel) and parallel_state.get_tensor_model_parallel_world_size() > 1
        named = [p for p in named_global_parameters(chunks, family) if not p.row.vocabulary]
        chosen = frozenset(_chosen(named, lora))
        self._of_weight: dict[int, Adapter] = {}
        rows: dict[_Key, tuple[Row, Row]] = {}
        owners = {id(m.weight): m for chunk in chunks for m in unwrapped(chunk).modules() if _has_weight(m)}
        for chunk in chunks:
            chunk.requires_grad_(False)
        for place in named:
            numbers = tuple(i for i, name in enumerate(place.hf) if name in chosen)
            if not numbers:
                continue
            beside = rows.setdefault((place.row.megatron, place.row.layers), _adapter_rows(place, numbers))
            adapter = _new(place, numbers, beside, lora, seed, sequence_parallel=parallel)
            linear = owners[id(place.parameter)]
            linear.add_module(ADAPTER, adapter.to(place.parameter.device))
            # Before other hooks, which read the whole output (latent_attention.py).
            linear.register_forward_hook(_add, prepend=True)
            self._of_weight[id(place.parameter)] = adapter
        # A pipeline rank has only its own rows, but every rank needs the names of the whole model.
        every: dict[_Key, tuple[Row, Row]] = {}
        for found in gathered(rows):
            every |= found
        self.family = replace(family, rows=(*family.rows, *itertools.chain.from_iterable(every.values())))
        """The model's map with the adapters in it, under HF's names such as `model.layers.0.mlp.up_proj.lora_A`."""

    def parameters(self) -> Iterator[NamedParameter]:
        """Yield A and B of all linears of this rank."""
        for place in named_global_parameters(self.chunks, self.family):
            if is_adapter(place.name):
                yield place

    def merged(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the data of a base parameter on this rank, merged with its adapter if it has one."""
        adapter = self._of_weight.get(id(parameter))
        return parameter.data if adapter is None else adapter.merged(parameter)


def is_adapter(name: str) -> bool:
    """Return whether a parameter name, Megatron's or HF's, is A or B."""
    return name.rpartition(".")[2] in (DOWN, UP)


def _has_weight(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), nn.Parameter)


def _whole_shapes(place: NamedParameter) -> list[torch.Size]:
    """Return the shapes of the HF matrices in a parameter."""
    parts = [torch.empty_like(place.parameter, device="meta")] * part_of(place.row).size
    return [tensor.shape for tensor in place.row.merge.to_hf(parts)]


def _chosen(named: Sequence[NamedParameter], lora: LoraSettings) -> list[str]:
    """Return the HF names of the adapted matrices, the same on every rank."""
    own = {
        name: tuple(shape)
        for place in named
        if any(map(is_projection, place.hf))
        for name, shape in zip(place.hf, _whole_shapes(place), strict=True)
    }
    everywhere: dict[str, tuple[int, ...]] = {}
    for shapes in gathered(own):
        everywhere |= shapes
    return lora.select(everywhere)


def _cut(row: Row) -> Cut:
    if row.split == "replicated":
        return "nothing"
    return "inputs" if isinstance(row.merge, Rows) else "outputs"


def _adapter_rows(place: NamedParameter, numbers: tuple[int, ...]) -> tuple[Row, Row]:
    """Return the rows of A and B for the row of a weight."""
    row, cut = place.row, _cut(place.row)
    outputs = tuple(shape[0] for shape in _whole_shapes(place))
    ups: Merge = Whole() if cut == "inputs" else _Ups(row.merge, outputs, numbers)
    base = f"{module_of(row.megatron)}.{ADAPTER}."

    def beside(word: str, merge: Merge, split: bool) -> Row:
        names = tuple(f"{module_of(row.hf[i])}.{word}" for i in numbers)
        return Row(base + word, names, merge, "tensor" if split else "replicated", row.layers)

    downs: Merge = Rows() if cut == "inputs" else _Downs(len(numbers))
    return beside(DOWN, downs, cut == "inputs"), beside(UP, ups, cut == "outputs")


def _new(
    place: NamedParameter,
    numbers: tuple[int, ...],
    rows: tuple[Row, Row],
    lora: LoraSettings,
    seed: int,
    *,
    sequence_parallel: bool,
) -> Adapter:
    """Return an adapter with this rank's part of a linear's initial A and B."""
    shapes, part = _whole_shapes(place), part_of(place.row)
    pairs = [first_adapter(place.hf[i], shapes[i], lora.rank, seed) for i in numbers]
    down, up = (
        row.merge.to_megatron([pair[which] for pair in pairs], part.rank, part.size).clone()
        for which, row in enumerate(rows)
    )
    cut = _cut(place.row)
    matrix = torch.zeros(len(up), dtype=torch.long)
    if cut != "inputs":
        order = {number: index for index, number in enumerate(numbers)}
        marks = [torch.full((shape[0], 1), order.get(i, -1)) for i, shape in enumerate(shapes)]
        matrix = place.row.merge.to_megatron(marks, part.rank, part.size).flatten()
    return Adapter(down, up, matrix, lora.scale, cut, sequence_parallel=sequence_parallel)
