"""List this rank's parameters with their names in the whole model, each with its row of the family's map.

`weights_in`, `weights_out` and the selection of parameters by name (`--only-train-params-name-list`) iterate over them.
Megatron numbers layers within a stage and experts within a rank, and Transformer Engine's layers contain the preceding
norm; this module uses the names of the whole model, in the local spec's naming.
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
"""Names of LoRA adapters; a map with rows for them (`lora.py`) includes them, and other maps skip them."""

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
    """A tensor of this rank, with its name in the whole model."""

    name: str
    """Name in the whole model, in the local spec's naming: "decoder.layers.3.mlp.linear_fc2.weight"."""
    row: Row
    layer: int | None
    """Layer number in the whole model, from 0; None outside the layers."""
    expert: int | None
    """Expert number in the whole model, from 0; None if not of an expert."""
    parameter: torch.Tensor
    """Parameter, or a buffer that is a weight (the router's `expert_bias`)."""
    copy: bool = False
    """True for the last pipeline stage's copy of a tied embedding, under the embedding's name: never exported."""

    @property
    def hf(self) -> tuple[str, ...]:
        """Names of the tensor in HF's files."""
        return tuple(name.format(layer=self.layer, expert=self.expert) for name in self.row.hf)


class Part(NamedTuple):
    """The part of a parameter on this rank; `speaks` is True if its replica represents the other replicas."""

    rank: int
    size: int
    speaks: bool


def unwrapped(chunk: Any) -> Any:
    """Return the GPTModel inside Megatron's wrappers (data parallelism, 16-bit parameters)."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def named_global_parameters(chunks: Sequence[Any], model: MegatronModel) -> Iterator[NamedParameter]:
    """Yield the parameters of this rank, chunk by chunk in Megatron's order.

    Args:
        chunks: The model of this rank, one per virtual pipeline stage; wrapped or not.
        model: The family's map; for a critic, its `weight_map.critic_of`.

    Raises:
        ConfigError: Parameters have no row or several rows; the message names them.
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
    """Return this rank's part of the parameters of a row, by Megatron's groups."""
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
    """Return `named_global_parameters` of this rank, after a check that the map fits all ranks together. Collective.

    Raises:
        ConfigError: As `named_global_parameters`, or no rank has some parameters of the map; raised on every rank.
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
    """Return the payloads of all ranks, by rank. Collective."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [payload]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, payload)
    return found


def _template(name: str, inner: Any) -> tuple[str, int | None, int | None]:
    """Convert a chunk's own name to the row's name, and the layer and expert number in the whole model."""
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
