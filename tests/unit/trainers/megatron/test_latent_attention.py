from __future__ import annotations

from typing import Any

import pytest
import torch
from slime_trainer_megatron.cpu_mode import on_device
from slime_trainer_megatron.model.latent_attention import DownProjection, LatentSelfAttention
from slime_trainer_megatron.process_groups import ProcessGroups


def attention(q_lora_rank: int | None = 12, **params: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import MLATransformerConfig, ModuleSpec, build_module
    from slime_trainer_megatron.model.attention import CoreAttention
    from slime_trainer_megatron.model.specs import RMSNorm

    config = MLATransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, q_lora_rank=q_lora_rank, kv_lora_rank=10, qk_head_dim=8,
        qk_pos_emb_head_dim=4, v_head_dim=6, rope_type="rope", attention_dropout=0.0, layernorm_epsilon=1e-3,
        add_bias_linear=False, use_cpu_initialization=True,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm")
    own = spec.submodules.self_attention
    own.submodules.core_attention = CoreAttention
    own.submodules.q_layernorm = own.submodules.kv_layernorm = RMSNorm
    with on_device("cpu"):
        made = ModuleSpec(LatentSelfAttention, {**own.params, **params}, own.submodules)
        return build_module(made, config=config, layer_number=1)


@pytest.mark.parametrize("q_lora_rank", [12, None])
def test_projections_to_the_latents_are_whole(groups: ProcessGroups, q_lora_rank: int | None) -> None:
    layer = attention(q_lora_rank)
    down = {name: module for name, module in layer.named_children() if isinstance(module, DownProjection)}
    shapes = {name: tuple(module.weight.shape) for name, module in down.items()}
    expected = {"linear_kv_down_proj": (14, 16)} | ({"linear_q_down_proj": (12, 16)} if q_lora_rank else {})
    assert shapes == expected
    assert all(module.weight.std() > 0 for module in down.values())
    with on_device("cpu"):
        output, _ = layer(torch.randn(5, 1, 16), None)
    assert output.shape == (5, 1, 16)


def test_norms_of_latents_have_their_own_epsilon(groups: ProcessGroups) -> None:
    plain, given = attention(), attention(latent_norm_eps=1e-6)
    assert [layer.q_layernorm.eps for layer in (plain, given)] == [1e-3, 1e-6]
    assert [layer.kv_layernorm.eps for layer in (plain, given)] == [1e-3, 1e-6]
