"""The linear attention of Qwen3-Next as a Megatron module, in the place of `SelfAttention`.

`megatron.layer_spec` puts it in the layers that have it. Megatron-core's own `ssm/gated_delta_net.py` needs
flash-linear-attention and refuses packed sequences; this one is plain torch, keeps packed sequences apart and splits
heads over tensor-parallel ranks, with or without sequence parallelism. There is no context parallelism: the state of a
sequence goes through its tokens in order.

Projections and convolution are ordered by key head (its query, key, value, output gate, beta and alpha rows), so that
equal parts of their rows are heads, for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn
from torch.nn import functional

from slime_models.qwen3_next.delta_rule import causal_conv, gated_delta_rule


@dataclass
class GatedDeltaNetSubmodules:
    """Megatron's linear layers, of the backend that the model is built for."""

    in_proj: Any
    """Column-parallel."""
    out_proj: Any
    """Row-parallel."""


class GatedDeltaNet(MegatronModule):  # type: ignore[misc]
    """Gated linear attention: [tokens, batch, hidden] -> the same, and None (no bias)."""

    def __init__(
        self,
        config: Any,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: Any,
        cp_comm_type: str | None = None,
    ) -> None:
        """
        Args:
            config: Sizes in the fields `linear_*`.
            submodules: The linear layers.
            layer_number: Over the whole model, from 1.
            pg_collection: Process groups; `tp` is used.
            cp_comm_type: Of context parallelism, which Megatron's configuration refuses for this attention.
        """
        super().__init__(config=config)
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        ranks = self.tp_group.size()
        assert config.context_parallel_size == 1
        assert config.linear_num_key_heads % ranks == 0
        self.heads = config.linear_num_key_heads // ranks
        self.values_per_key = config.linear_num_value_heads // config.linear_num_key_heads
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        of_values = self.values_per_key * value_dim
        self.sections = [key_dim, key_dim, of_values, of_values, self.values_per_key, self.values_per_key]
        """Rows per key head: query, key, value, output gate, beta, alpha."""
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            config.linear_num_key_heads * sum(self.sections),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **common,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            config.linear_num_value_heads * value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **common,
        )
        channels, taps = self.heads * sum(self.sections[:3]), config.linear_conv_kernel_dim
        of_heads = self.heads * self.values_per_key
        self.conv = _Weight(torch.empty(channels, 1, taps).uniform_(-(taps**-0.5), taps**-0.5), config, split=True)
        self.A_log = _parameter(torch.empty(of_heads).uniform_(0.01, 16.0).log(), config, split=True)
        self.dt_bias = _parameter(torch.ones(of_heads), config, split=True)
        self.norm = _Weight(torch.ones(value_dim), config, split=False)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, None]:
        """Attend from every token to itself and those before it in its sequence.

        Args:
            hidden_states: [tokens, batch, hidden], the tokens of this rank under sequence parallelism.
            attention_mask: Not read: the layer is causal by itself.
            options: What Megatron's layer gives every attention. Read are `packed_seq_params` and
                `inference_context`; rotary positions are not, this attention has none.
        """
        assert options.get("inference_context") is None, "training only"
        mixed, _ = self.in_proj(hidden_states)
        tokens, batch = mixed.shape[:2]
        lengths = _lengths(options.get("packed_seq_params"), tokens, batch)
        # [batch * tokens, heads, ...]: sequence after sequence.
        per_head = mixed.transpose(0, 1).reshape(tokens * batch, self.heads, sum(self.sections))
        qkv, gate, beta, alpha = torch.split(per_head, [sum(self.sections[:3]), *self.sections[3:]], -1)
        qkv = functional.silu(causal_conv(qkv.flatten(1), self.conv.weight.squeeze(1), lengths))
        query, key, value = torch.split(qkv.view(len(qkv), self.heads, -1), self.sections[:3], -1)
        # Every key head serves this many value heads, one after another.
        query, key = (x.repeat_interleave(self.values_per_key, 1) for x in (query, key))
        value, gate = (x.reshape(len(x), query.shape[1], -1) for x in (value, gate))
        decay = -self.A_log.float().exp() * functional.softplus(alpha.flatten(1).float() + self.dt_bias)
        found = gated_delta_rule(query, key, value, decay, beta.flatten(1).sigmoid(), lengths)
        found = self._gated_norm(found.to(mixed.dtype), gate)
        out, _ = self.out_proj(found.reshape(batch, tokens, -1).transpose(0, 1).contiguous())
        return out, None

    def _gated_norm(self, found: Tensor, gate: Tensor) -> Tensor:
        """[..., value_dim] twice -> the same: RMSNorm, then the gate. Rounding as in the HF model."""
        # The weight is whole on every rank and each rank's gradient comes from its heads: sum them.
        weight = copy_to_tensor_model_parallel_region(self.norm.weight, group=self.tp_group)
        wide = found.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon)
        scaled: Tensor = weight * wide.to(found.dtype)
        return (scaled * functional.silu(gate.float())).to(found.dtype)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
        tp_group: Any = None,
    ) -> dict[str, Any]:
        """For `dist_checkpointing`: every split tensor is split by its rows, so any layout reads any other's."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        group = tp_group if tp_group is not None else self.tp_group
        own = {name: tensor for name, tensor in self.state_dict(keep_vars=True).items() if not _is_linear(name)}
        split = dict.fromkeys(("A_log", "dt_bias", "conv.weight"), 0)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, split, sharded_offsets, tp_group=group, dp_cp_group=metadata["dp_cp_group"]
        )
        for name in ("in_proj", "out_proj"):
            linear = getattr(self, name)
            sharded.update(sharded_state_dict_default(linear, f"{prefix}{name}.", sharded_offsets, metadata, group))
        return sharded


class _Weight(nn.Module):
    """A tensor under the name "weight"."""

    def __init__(self, values: Tensor, config: Any, *, split: bool) -> None:
        super().__init__()
        self.weight = _parameter(values, config, split=split)


def _parameter(values: Tensor, config: Any, *, split: bool) -> nn.Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = nn.Parameter(values.to(device=device, dtype=config.params_dtype))
    set_tensor_model_parallel_attributes(parameter, split, 0, 1)
    return parameter


def _is_linear(name: str) -> bool:
    return name.startswith(("in_proj.", "out_proj."))


def _lengths(packed: Any, tokens: int, batch: int) -> list[int]:
    """Tokens of each sequence, in the order of the flattened batch."""
    if packed is None:
        return [tokens] * batch
    assert batch == 1, "packed sequences come as one row"
    bounds = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    ends: list[int] = bounds.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    return [*lengths, tokens - ends[-1]]  # what pads the row after its last sequence
