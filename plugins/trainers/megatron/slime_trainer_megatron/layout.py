"""How a model is laid out over ranks: sizes from flags, and their arithmetic, before anything is started.

Read by everything in this package; imports neither torch nor Megatron, so that `slime check` answers at once. The ranks
of expert parallelism are taken out of tensor x context x data, so it is no factor of `model_size`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_trainer_megatron.arguments.values import given, given_fields

_FIELDS: Mapping[str, str] = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual": "virtual_pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
}
_EDGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of one model."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    """Model chunks per pipeline stage (interleaved schedule); None is one chunk, without interleaving."""
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """Tensor parallelism within experts; None is `tensor`."""
    sequence_parallel: bool = False

    @classmethod
    def from_args(cls, args: Args, num_layers: int | None = None) -> Layout:
        """Read the flags.

        Args:
            args: The run's settings.
            num_layers: Of the model; where it is known, layers are counted out over stages too.

        Raises:
            ConfigError: Sizes contradict each other.
        """
        fields = given_fields(args)
        sizes = {name: fields[field] for name, field in _FIELDS.items() if field in fields}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"{_flag(name)} {size}: at least 1")
        # As in Megatron-LM, whose launch scripts leave the flag in where they do not split: there is nothing to share.
        sequence = bool(fields.get("sequence_parallel", False)) and sizes.get("tensor", 1) > 1
        layout = cls(**sizes, sequence_parallel=sequence)
        per_chunk = given(args, "num_layers_per_virtual_pipeline_stage")
        if per_chunk is not None and num_layers is not None:
            layout = _with_chunks_of(layout, per_chunk, num_layers, fields)
        layout._check(fields, interleaved=per_chunk is not None)
        if num_layers is not None:
            _check_stages(layout, num_layers, fields)
        return layout

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model: tensor * pipeline * context."""
        return self.tensor * self.pipeline * self.context

    def data_size(self, world_size: int) -> int:
        """Data-parallel size. Raises ConfigError when copies of the model, or of its experts, do not divide the ranks.

        Args:
            world_size: Number of ranks.
        """
        data, rest = divmod(world_size, self.model_size)
        if rest or data < 1:
            raise ConfigError(
                f"{world_size} ranks cannot hold whole copies of a model over {self.model_size} ranks ({self.cited});"
                f" start a multiple of {self.model_size}"
            )
        experts = (self.expert_tensor or self.tensor) * self.expert * self.pipeline
        if world_size % experts:
            raise ConfigError(
                f"{world_size} ranks cannot hold whole copies of experts over {experts} ranks"
                f" (--expert-tensor-parallel-size {self.expert_tensor or self.tensor}, --expert-model-parallel-size"
                f" {self.expert}, --pipeline-model-parallel-size {self.pipeline}); start a multiple of {experts}"
            )
        return data

    @property
    def micro_batch_multiple(self) -> int:
        """The interleaved schedule takes micro-batches in groups of this size."""
        return self.pipeline if self.virtual else 1

    @property
    def cited(self) -> str:
        """The factors of `model_size`, for messages."""
        return (
            f"--tensor-model-parallel-size {self.tensor} x --pipeline-model-parallel-size {self.pipeline}"
            f" x --context-parallel-size {self.context}"
        )

    def apart_from(self, other: Layout) -> str:
        """The flags of this layout that another has otherwise, for messages."""
        names = [name for name in (*_FIELDS, "sequence_parallel") if getattr(self, name) != getattr(other, name)]
        flags = {**_FIELDS, "sequence_parallel": "sequence_parallel"}
        return ", ".join(f"--{flags[name].replace('_', '-')} {getattr(self, name)}" for name in names)

    def check_model(self, transformer: Mapping[str, Any]) -> None:
        """Heads, key-value groups and experts, counted out over ranks.

        Args:
            transformer: Fields of `TransformerConfig`, as a model family's `Architecture` has them.

        Raises:
            ConfigError: Something does not divide.
        """
        heads = transformer.get("num_attention_heads", 0)
        if heads % self.tensor:
            raise ConfigError(f"{_flag('tensor')} {self.tensor} does not divide the model's {heads} attention heads")
        groups = transformer.get("num_query_groups") or heads
        latent = transformer.get("multi_latent_attention", False)
        if not latent and groups % self.tensor and self.tensor % groups:
            raise ConfigError(
                f"{_flag('tensor')} {self.tensor} and the model's {groups} key-value heads: one must divide the other"
            )
        variant = transformer.get("experimental_attention_variant")
        if self.context > 1 and variant:
            raise ConfigError(f"{_flag('context')} {self.context}: Megatron cannot cut {variant} along the sequence")
        keys = transformer.get("linear_num_key_heads") or self.tensor
        if keys % self.tensor:
            raise ConfigError(f"{_flag('tensor')} {self.tensor} does not divide the model's {keys} linear key heads")
        experts = transformer.get("num_moe_experts")
        if experts:
            self._check_experts(experts)
        elif self.expert > 1:
            raise ConfigError(f"{_flag('expert')} {self.expert}: the model has no experts; remove it")

    def _check_experts(self, experts: int) -> None:
        if experts % self.expert:
            raise ConfigError(f"{_flag('expert')} {self.expert} does not divide the model's {experts} experts")
        if self.tensor > 1 and not self.sequence_parallel:
            # Megatron's MoE layer raises in training: every tensor-parallel rank would route the same tokens.
            raise ConfigError(
                f"{_flag('tensor')} {self.tensor}: a model with experts needs --sequence-parallel with it; add it"
            )

    def _check(self, given: Mapping[str, Any], *, interleaved: bool) -> None:
        if (self.virtual or interleaved) and self.pipeline == 1:
            flag = "--num-layers-per-virtual-pipeline-stage" if interleaved else _flag("virtual")
            raise ConfigError(f"{flag}: needs --pipeline-model-parallel-size of 2 or more; remove it")
        for name in _EDGES:
            if name in given and self.pipeline == 1:
                raise ConfigError(
                    f"{_edge_flag(name)} {given[name]}: needs --pipeline-model-parallel-size of 2 or more"
                )


def _flag(name: str) -> str:
    return "--" + _FIELDS[name].replace("_", "-")


def _edge_flag(name: str) -> str:
    return "--decoder-first-pipeline-num-layers" if "first" in name else "--decoder-last-pipeline-num-layers"


def _counted(num_layers: int, given: Mapping[str, Any]) -> int:
    """Layers as Megatron counts them out: embedding and loss may stand for one each."""
    return num_layers + sum(bool(given.get(name)) for name in _COUNTED)


def _with_chunks_of(layout: Layout, per_chunk: int, num_layers: int, given: Mapping[str, Any]) -> Layout:
    """`--num-layers-per-virtual-pipeline-stage` -> chunks per stage; one chunk is no interleaving, as in Megatron."""
    flag = "--num-layers-per-virtual-pipeline-stage"
    if layout.virtual is not None:
        raise ConfigError(f"{flag} {per_chunk}: {_flag('virtual')} {layout.virtual} says the same; remove one")
    edges = [name for name in _EDGES if name in given]
    if edges:
        raise ConfigError(f"{flag} {per_chunk}: stages are uneven ({_edge_flag(edges[0])}); remove one")
    total = _counted(num_layers, given)
    if per_chunk < 1 or total % layout.pipeline or (total // layout.pipeline) % per_chunk:
        raise ConfigError(
            f"{flag} {per_chunk}: {total} layers over {layout.pipeline} stages cannot be cut into such chunks"
        )
    chunks = total // layout.pipeline // per_chunk
    return Layout(**{**vars(layout), "virtual": chunks if chunks > 1 else None})


def _check_stages(layout: Layout, num_layers: int, given: Mapping[str, Any]) -> None:
    """Layers over stages and chunks, as `get_num_layers_to_build` of transformer_block.py counts them."""
    total, chunks = _counted(num_layers, given), layout.virtual or 1
    layers, stages = total, layout.pipeline
    for name in _EDGES:
        if name in given:
            if total != num_layers:
                flag = "--" + next(extra for extra in _COUNTED if given.get(extra)).replace("_", "-")
                raise ConfigError(f"{flag}: does not go with {_edge_flag(name)} {given[name]}; remove one")
            layers, stages = layers - given[name], stages - 1
            if given[name] < 1 or given[name] % chunks:
                raise ConfigError(
                    f"{_edge_flag(name)} {given[name]}: not divisible into {chunks} chunks of a layer or more"
                )
    said = f"the model's {num_layers} layers" + (f" (counted as {total})" if total != num_layers else "")
    if layers < stages * chunks or (stages and layers % (stages * chunks)) or (not stages and layers):
        over = f"{stages} stages" + (f" of {chunks} chunks" if chunks > 1 else "")
        raise ConfigError(
            f"{_flag('pipeline')} {layout.pipeline}: {layers} of {said} cannot be spread evenly over {over}; set"
            " --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers, or another size"
        )
