"""Qwen3-Next for Megatron: the plugin of kind "megatron_models" for `model_type` qwen3_next.

Every `full_attention_interval`-th layer has gated full attention (a sigmoid gate per output, rotary positions on a
quarter of a head), the others gated linear attention. The norms scale by 1 + weight, except the norm inside linear
attention. Layers with experts also have a shared expert behind a gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slime_trainer_megatron.families import (
    LAYER,
    Architecture,
    Columns,
    MegatronModel,
    Merge,
    Row,
    Rows,
    Whole,
    attention_rows,
    decoder_architecture,
    dense_mlp_rows,
    embedding_rows,
    expert_rows,
)

from slime_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
"""Default values of fields that `config.json` omits, as in transformers' `Qwen3NextConfig`."""


def megatron(hf: Mapping[str, Any]) -> MegatronModel:
    """Return the architecture and the weight map for the `config.json` of a `Qwen3NextForCausalLM`.

    Raises:
        ConfigError: A field is missing, does not fit the others, or needs a feature that this family lacks.
    """
    hf = {**DEFAULTS, **hf}
    if hf.get("attention_bias"):
        raise ConfigError("config.json: attention_bias true is not supported for qwen3_next; allowed: false")
    if "num_hidden_layers" not in hf:
        raise ConfigError("config.json has no 'num_hidden_layers', which every decoder needs")
    layers = range(int(hf["num_hidden_layers"]))
    full = _full_attention_layers(hf, layers)
    linear = tuple(layer for layer in layers if layer not in full)
    sparse = _sparse_layers(hf, layers)
    dense = tuple(layer for layer in layers if layer not in sparse)
    architecture = decoder_architecture(
        hf,
        qk_layernorm=True,
        attention_output_gate=True,
        layernorm_zero_centered_gamma=True,
        **_linear_fields(hf, full, layers),
        **(_expert_fields(hf, sparse, layers) if sparse else {}),
    )
    rows = embedding_rows(architecture)
    if full:
        rows += attention_rows(architecture, layers=full, gated=True)
    if linear:
        rows += linear_attention_rows(architecture, linear)
    if sparse:
        rows += expert_rows(layers=sparse, shared="shared_expert", shared_gate="shared_expert_gate")
    if dense:
        rows += dense_mlp_rows(architecture, layers=dense)
    return MegatronModel(replace(architecture, extra={"linear": linear}), rows, layer_spec, carried=(r"mtp\..*",))


def layer_spec(spec: Any, config: Any, architecture: Architecture, layer: int) -> Any:
    """Replace the attention by the family's: gated full or linear."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    from slime_models.qwen3_next.gated_attention import GatedSelfAttention
    from slime_models.qwen3_next.linear_attention import GatedDeltaNet, GatedDeltaNetSubmodules

    parts = spec.submodules
    if layer not in architecture.extra["linear"]:
        gated = replace(parts.self_attention, module=GatedSelfAttention)
        return replace(spec, submodules=replace(parts, self_attention=gated))
    out_proj = parts.self_attention.submodules.linear_proj
    backend: Any = LocalSpecProvider()
    if out_proj is not RowParallelLinear:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        backend = TESpecProvider()
    linears = GatedDeltaNetSubmodules(in_proj=backend.column_parallel_linear(), out_proj=out_proj)
    norm = parts.input_layernorm
    if norm is IdentityOp:  # Transformer Engine's layers have it within the projection that is replaced here
        norm = backend.layer_norm(rms_norm=True)
    attention = ModuleSpec(module=GatedDeltaNet, submodules=linears)
    return replace(spec, submodules=replace(parts, input_layernorm=norm, self_attention=attention))


def linear_attention_rows(architecture: Architecture, layers: tuple[int, ...]) -> list[Row]:
    """Return the weight rows of linear attention and the norm before it."""
    fields = architecture.transformer
    of_values = fields["linear_num_value_heads"] // fields["linear_num_key_heads"]
    key, value = fields["linear_key_head_dim"], fields["linear_value_head_dim"] * of_values
    ours, theirs = "decoder.layers.{layer}.self_attention.", f"{LAYER}linear_attn."
    projections = (f"{theirs}in_proj_qkvz.weight", f"{theirs}in_proj_ba.weight")
    in_proj = PerHead((2 * key + 2 * value, 2 * of_values))
    conv = PerHeadFused((key, key, value))
    norms = ("decoder.layers.{layer}.input_layernorm.weight", f"{LAYER}input_layernorm.weight")
    return [
        Row(norms[0], (norms[1],), Whole(), "replicated", layers),
        Row(f"{ours}in_proj.weight", projections, in_proj, layers=layers),
        Row(f"{ours}conv.weight", (f"{theirs}conv1d.weight",), conv, layers=layers),
        Row(f"{ours}A_log", (f"{theirs}A_log",), Columns(), layers=layers),
        Row(f"{ours}dt_bias", (f"{theirs}dt_bias",), Columns(), layers=layers),
        Row(f"{ours}norm.weight", (f"{theirs}norm.weight",), Whole(), "replicated", layers),
        Row(f"{ours}out_proj.weight", (f"{theirs}out_proj.weight",), Rows(), layers=layers),
    ]


@dataclass(frozen=True)
class PerHead(Merge):
    """Merge HF tensors, each ordered head by head, into one: for every head, its rows from all tensors."""

    rows: tuple[int, ...]
    """Rows of one head in each tensor."""

    def to_megatron(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """Merge tensors [heads * rows, ...] into [heads * all rows / size, ...]. Raises ValueError unless size divides
        the heads."""
        import torch

        per_head = [
            tensor.reshape(-1, rows, *tensor.shape[1:]) for tensor, rows in zip(tensors, self.rows, strict=True)
        ]
        if len(per_head[0]) % size:
            raise ValueError(f"{len(per_head[0])} heads do not divide into {size} equal parts")
        return Columns().to_megatron([torch.cat(per_head, 1).flatten(0, 1)], rank, size)

    def to_hf(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the original HF tensors."""
        import torch

        (whole,) = Columns().to_hf(parts)
        per_head = whole.reshape(-1, sum(self.rows), *whole.shape[1:])
        return [part.flatten(0, 1) for part in torch.split(per_head, list(self.rows), 1)]

    def read_axis(self, size: int) -> int | None:
        """Return axis 0, for every size."""
        return 0


@dataclass(frozen=True)
class PerHeadFused(Merge):
    """Reorder an HF tensor of all heads' queries, then all keys, then all values, to go head by head."""

    rows: tuple[int, ...]
    """Rows of one head in each of the sections."""

    def to_megatron(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """Convert [heads * rows, ...] to this rank's part [heads * rows / size, ...]."""
        import torch

        (fused,) = tensors
        heads = fused.shape[0] // sum(self.rows)
        sections = torch.split(fused, [heads * rows for rows in self.rows])
        return PerHead(self.rows).to_megatron(sections, rank, size)

    def to_hf(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the original HF tensor, in a list."""
        import torch

        return [torch.cat(PerHead(self.rows).to_hf(parts))]


def _full_attention_layers(hf: Mapping[str, Any], layers: range) -> tuple[int, ...]:
    """Return the layers with full attention, from `layer_types` (transformers) or `full_attention_interval`."""
    kinds = hf.get("layer_types")
    if kinds is None:
        interval = int(hf["full_attention_interval"])
        return tuple(layer for layer in layers if (layer + 1) % interval == 0)
    unknown = set(kinds) - {"full_attention", "linear_attention"}
    if unknown or len(kinds) != len(layers):
        raise ConfigError(
            f"config.json: layer_types has {len(kinds)} entries, of kinds {sorted(set(kinds))}; needed: one for each "
            f"of {len(layers)} layers, 'full_attention' or 'linear_attention'"
        )
    return tuple(layer for layer in layers if kinds[layer] == "full_attention")


def _sparse_layers(hf: Mapping[str, Any], layers: range) -> tuple[int, ...]:
    step, dense = int(hf["decoder_sparse_step"]), set(hf.get("mlp_only_layers") or ())
    if not int(hf["num_experts"]):
        return ()
    return tuple(layer for layer in layers if (layer + 1) % step == 0 and layer not in dense)


def _linear_fields(hf: Mapping[str, Any], full: tuple[int, ...], layers: range) -> dict[str, Any]:
    keys, values = int(hf["linear_num_key_heads"]), int(hf["linear_num_value_heads"])
    if values % keys:
        raise ConfigError(
            f"config.json: linear_num_value_heads {values} is not divisible by linear_num_key_heads {keys}"
        )
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(layer not in full) for layer in layers],
        "linear_conv_kernel_dim": int(hf["linear_conv_kernel_dim"]),
        "linear_key_head_dim": int(hf["linear_key_head_dim"]),
        "linear_value_head_dim": int(hf["linear_value_head_dim"]),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
    }


def _expert_fields(hf: Mapping[str, Any], sparse: tuple[int, ...], layers: range) -> dict[str, Any]:
    number, per_token = int(hf["num_experts"]), int(hf["num_experts_per_tok"])
    if not 0 < per_token <= number:
        raise ConfigError(f"config.json: num_experts_per_tok {per_token} of {number} experts; allowed: 1 to {number}")
    return {
        "num_moe_experts": number,
        "moe_layer_freq": [int(layer in sparse) for layer in layers],
        "moe_ffn_hidden_size": int(hf["moe_intermediate_size"]),
        "moe_shared_expert_intermediate_size": int(hf["shared_expert_intermediate_size"]),
        "moe_shared_expert_gate": True,
        "moe_router_topk": per_token,
        "moe_router_score_function": "softmax",
        # Of the chosen experts' logits alone: the probabilities divided by their sum.
        "moe_router_pre_softmax": not hf["norm_topk_prob"],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
