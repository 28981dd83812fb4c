"""This rank's parameters under the names of the whole model, each with its row of the family's map.

`weights_in`, `weights_out` and whoever chooses parameters by name (`--only-train-params-name-list`) iterate them.
Megatron numbers layers within a stage and experts within a rank, and Transformer Engine's layers hold the norm before
them; the names here are those of the whole model, in the local spec's naming.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from slime_core.errors import ConfigError
from slime_trainer_megatron.families.family import MegatronModel, Row, places

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")
_ADAPTER = re.compile(r"\.adapter\.lora_[AB]$")
"""Of LoRA; a map has rows for them (`lora.py`) when they are meant, and they are passed over when it has none."""

_OF_TRANSFORMER_ENGINE = [
    (re.compile(pattern), local)
    for pattern, local in (
        (r"^self_attention\.(?:linear_qkv|in_proj)\.layer_norm_(\w+)$", r"input_layernorm.\1"),
        (r"^self_attention\.linear_q_up_proj\.layer_norm_(\w+)$", r"self_attention.q_layernorm.\1"),
        (r"^self_attention\.linear_kv_up_proj\.layer_norm_(\w+)$", r"self_attention.kv_layernorm.\1"),
        (r"^mlp\.linear_fc1\.layer_norm_(\w+)$", r"pre_mlp_layernorm.\1"),
        (r"^mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r"mlp.experts.local_experts.\3.\1.\2"),
    )
]
"""Names within a layer of Transformer Engine's modules (layers with a norm inside, grouped experts) -> local spec's."""


class NamedParameter(NamedTuple):
    """One tensor of this rank."""

    name: str
    """Over the whole model, in the local spec's naming: "decoder.layers.3.mlp.linear_fc2.weight"."""
    row: Row
    layer: int | None
    """Over the whole model, from 0; None outside the layers."""
    expert: int | None
    """Over the whole model, from 0."""
    parameter: torch.Tensor
    """A parameter, or a buffer that is a weight (the router's `expert_bias`)."""
    copy: bool = False
    """The last pipeline stage's own copy of a tied embedding, under the embedding's name: loaded, never exported."""

    @property
    def hf(self) -> tuple[str, ...]:
        """The names in HF's files."""
        return tuple(name.format(layer=self.layer, expert=self.expert) for name in self.row.hf)


class Part(NamedTuple):
    """Which part of a parameter this rank has, and whether it is the replica that speaks for the others."""

    rank: int
    size: int
    speaks: bool


def unwrapped(chunk: Any) -> Any:
    """The GPTModel inside Megatron's wrappers (data parallelism, 16-bit parameters)."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def named_global_parameters(chunks: Sequence[Any], model: MegatronModel) -> Iterator[NamedParameter]:
    """What this rank holds, chunk by chunk in Megatron's order.

    Args:
        chunks: The model of this rank, one per virtual pipeline stage; wrapped or not.
        model: The family's map; of a critic, `weight_map.critic_of` it.

    Raises:
        ConfigError: Parameters have no row, or several; all are named.
    """
    rows: dict[str, list[Row]] = {}
    for row in model.rows:
        rows.setdefault(row.megatron, []).append(row)
    problems: list[str] = []
    found: list[NamedParameter] = []
    for chunk in chunks:
        inner = unwrapped(chunk)
        weights = [(name, tensor, True) for name, tensor in inner.named_parameters()]
        weights += [(name, tensor, False) for name, tensor in inner.named_buffers()]
        for own_name, tensor, needed in weights:
            template, layer, expert = _template(own_name, inner)
            copy = template == "output_layer.weight" and model.architecture.tie_word_embeddings
            if copy:
                template = "embedding.word_embeddings.weight"
            fitting = [row for row in rows.get(template, []) if row.layers is None or layer in row.layers]
            name = template.format(layer=layer, expert=expert)
            if len(fitting) == 1:
                found.append(NamedParameter(name, fitting[0], layer, expert, tensor, copy))
            elif fitting or (needed and not _ADAPTER.search(template)):
                problems.append(f"{name}: {len(fitting)} rows" if fitting else f"{name} (here {own_name}): no row")
    if problems:
        raise ConfigError(
            f"the family's name map does not fit the Megatron model, {len(problems)} parameters:\n  "
            + "\n  ".join(problems[:20])
        )
    yield from found


def part_of(row: Row) -> Part:
    """This rank's part of the parameters of a row, by Megatron's groups."""
    from megatron.core import parallel_state

    if "{expert}" in row.megatron:
        rank = parallel_state.get_expert_tensor_parallel_rank()
        size = parallel_state.get_expert_tensor_parallel_world_size()
        speaks = parallel_state.get_expert_data_parallel_rank() == 0
    else:
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
        speaks = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    if row.split == "replicated":
        return Part(0, 1, speaks and rank == 0)
    return Part(rank, size, speaks)


def checked_parameters(chunks: Sequence[Any], model: MegatronModel) -> list[NamedParameter]:
    """`named_global_parameters` of this rank, once it is known that the map fits all ranks together. Collective.

    Raises:
        ConfigError: As `named_global_parameters`, or no rank has some parameters of the map; on every rank when on one.
    """
    problem, own = "", []
    try:
        own = list(named_global_parameters(chunks, model))
    except ConfigError as error:
        problem = str(error)
    answers = gathered((problem, [parameter.name for parameter in own]))
    if problems := list(dict.fromkeys(text for text, _ in answers if text)):
        raise ConfigError("\n".join(problems))
    held = {name for _, names in answers for name in names}
    if absent := [place.megatron for place in places(model) if place.megatron not in held]:
        raise ConfigError(
            f"the family's name map has {len(absent)} parameters that no rank has:\n  " + "\n  ".join(absent[:20])
        )
    return own


def gathered(payload: Any) -> list[Any]:
    """Every rank's, by rank. Collective."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [payload]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, payload)
    return found


def _template(name: str, inner: Any) -> tuple[str, int | None, int | None]:
    """A chunk's own name -> the row's name, the layer's number and the expert's over the whole model."""
    within = _LAYER.fullmatch(name)
    if within is None:
        return name, None, None
    layer, rest = inner.decoder.layers[int(within[1])], within[2]
    for pattern, local in _OF_TRANSFORMER_ENGINE:
        rest = pattern.sub(local, rest)
    expert = None
    if here := _EXPERT.search(rest):
        expert = int(layer.mlp.local_expert_indices[int(here[0])])
        rest = _EXPERT.sub("{expert}", rest)
    # Megatron has added the stage's offset and counts from 1.
    return f"decoder.layers.{{layer}}.{rest}", int(layer.layer_number) - 1, expert
