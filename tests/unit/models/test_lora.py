"""Which matrices get adapters, what they start from, what a layer with one computes, and the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from slime_embedded.models.decoder import Decoder
from slime_embedded.models.lora import LoraSettings, merged, read_adapter, write_adapter
from slime_embedded.models.lora_linear import LoraLinear, adapter_weights, add_adapters
from slime_testing_contracts.tiny import tiny_model, tiny_moe_model
from torch import nn
from torch.nn import functional

from slime_core.config import Args
from slime_core.errors import CheckpointError, ConfigError
from slime_core.models.config import load_model_config


def settings(**flags: Any) -> LoraSettings:
    found = LoraSettings.from_args(Args(**{"lora_rank": 4} | flags))
    assert found is not None
    return found


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = Decoder(load_model_config(directory))
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


# -- settings, selection -----------------------------------------------------------------------------------


def test_routed_experts_and_routers_get_none() -> None:
    found = shapes(tiny_moe_model())
    chosen = settings().select(found)
    assert not [name for name in chosen if ".experts." in name or "mlp.gate." in name or "lm_head" in name]
    assert "model.layers.1.mlp.gate_proj.weight" in chosen, "the dense layer"
    assert "model.layers.0.self_attn.q_proj.weight" in chosen
    with pytest.raises(
        ConfigError, match=r"up_proj: this model has routed experts.*allowed: k_proj, o_proj, q_proj, v_"
    ):
        settings(lora_target_modules=["q_proj", "up_proj"]).select(found)


def test_shared_experts_and_latent_attention_count_as_dense() -> None:
    names = ("self_attn.kv_a_proj_with_mqa", "mlp.shared_experts.up_proj", "linear_attn.in_proj_qkvz")
    found = {f"model.layers.0.{name}.weight": (64, 64) for name in names}
    others = ("mlp.experts.3.up_proj.weight", "mlp.gate.weight", "self_attn.q_proj.bias", "linear_attn.conv1d.weight")
    found |= {f"model.layers.0.{name}": (64, 64) for name in others}
    assert settings().select(found) == [f"model.layers.0.{name}.weight" for name in names]


def test_targets_that_do_not_fit() -> None:
    found = shapes(tiny_model())
    with pytest.raises(
        ConfigError, match=r"--lora-target-modules lm_head: no such module.*down_proj, .* or all-linear"
    ):
        settings(lora_target_modules=["lm_head"]).select(found)
    with pytest.raises(ConfigError, match=r"--lora-target-modules all-linear: no such module"):
        settings(lora_target_modules=["q_proj", "all-linear"]).select(found)
    with pytest.raises(ConfigError, match=r"--lora-rank 1000: model.layers.0.self_attn.q_proj.weight is \["):
        settings(lora_rank=1000).select(found)


# -- first values, arithmetic ------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_and_its_gradients_are_those_of_the_formula(merge: bool, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(6, 5, bias=bias, dtype=torch.float64).requires_grad_(False)
    down, up = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((3, 6), (5, 3)))
    x = torch.randn(2, 7, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    layer = LoraLinear(linear, down.clone(), up.clone(), 2.5, merge=merge)
    target = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64)

    plain = [t.clone().requires_grad_() for t in (x.detach(), down, up)]
    expected = functional.linear(plain[0], linear.weight + 2.5 * plain[2] @ plain[1], linear.bias)
    (expected * target).sum().backward()
    found = layer(x)
    (found * target).sum().backward()
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip((x, layer.lora_A, layer.lora_B), plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert linear.weight.grad is None


def test_merging_is_the_product_with_the_merged_weight_bit_for_bit() -> None:
    linear = nn.Linear(32, 24, bias=False)
    layer = LoraLinear(linear, torch.randn(4, 32), torch.randn(24, 4), 0.7, merge=True)
    x = torch.randn(32, 32)
    assert torch.equal(layer(x), functional.linear(x, layer.merged_weight()))
    torch.testing.assert_close(merged(linear.weight, layer.lora_A, layer.lora_B, 0.7), layer.merged_weight())


# -- a model -----------------------------------------------------------------------------------------------


def adapted(**flags: Any) -> Decoder:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = Decoder(load_model_config(tiny_model()))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    add_adapters(model, settings(**flags), seed=0)
    return model


# -- files -------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    model = adapted()
    write_adapter(tmp_path, settings(), adapter_weights(model), [], "base")
    other = adapted(lora_rank=2, lora_target_modules=["q_proj"])
    before = {name: tensor.clone() for name, tensor in adapter_weights(other).items()}
    with pytest.raises(CheckpointError) as caught:
        read_adapter(tmp_path, settings(lora_rank=2), adapter_weights(other))
    text = str(caught.value)
    assert "--lora-rank was 4, is 2" in text
    assert "--lora-alpha was 4.0, is 2.0" in text
    with pytest.raises(CheckpointError, match=r"unknown model\.layers\.0\.mlp\.down_proj\.lora_A"):
        read_adapter(tmp_path, settings(), adapter_weights(other))
    for name, tensor in adapter_weights(other).items():
        assert torch.equal(tensor, before[name])
    with pytest.raises(CheckpointError, match=r"missing model\.new\.lora_A"):
        read_adapter(tmp_path, settings(), {**adapter_weights(model), "model.new.lora_A": torch.zeros(1)})
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: cannot be read"):
        read_adapter(tmp_path, settings(), adapter_weights(model))
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: cannot be read"):
        read_adapter(tmp_path, settings(), adapter_weights(model))
