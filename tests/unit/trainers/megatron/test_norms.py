from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from slime_trainer_megatron.model.specs import RMSNorm

from slime_core.errors import ConfigError


def config(**changes: Any) -> TransformerConfig:
    fields = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "normalization": "RMSNorm"}
    return TransformerConfig(**{**fields, **changes})


def test_it_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    reference, norm = LlamaRMSNorm(8, eps=1e-6), RMSNorm(config(), 8, eps=1e-6)
    with torch.no_grad():
        reference.weight.copy_(torch.randn(8))
        norm.weight.copy_(reference.weight)
    x = torch.randn(3, 2, 8)
    torch.testing.assert_close(norm(x), reference(x))


def test_a_zero_centered_weight_is_stored_minus_one() -> None:
    plain, centered = RMSNorm(config(), 8), RMSNorm(config(layernorm_zero_centered_gamma=True), 8)
    assert torch.equal(centered.weight, torch.zeros(8))
    x = torch.randn(3, 8)
    torch.testing.assert_close(centered(x), plain(x))
    with torch.no_grad():
        plain.weight += 0.25
        centered.weight += 0.25
    torch.testing.assert_close(centered(x), plain(x))


def test_it_has_the_mark_of_sequence_parallelism_and_the_dtype() -> None:
    norm = RMSNorm(config(tensor_model_parallel_size=2, sequence_parallel=True, params_dtype=torch.bfloat16), 8)
    assert norm.weight.sequence_parallel is True
    assert norm.weight.dtype == torch.bfloat16
    assert RMSNorm(config(), 8).weight.sequence_parallel is False


def test_other_norms_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--normalization LayerNorm: .*only RMSNorm"):
        RMSNorm(config(normalization="LayerNorm"), 8)
