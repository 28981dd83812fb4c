"""HF -> Megatron -> HF in one process: names, numbers, and what is said of checkpoints and maps that do not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from slime_trainer_megatron.cpu_mode import on_device
from slime_trainer_megatron.families import (
    MegatronModel,
    Row,
    Whole,
    attention_rows,
    decoder_architecture,
    dense_mlp_rows,
    expert_rows,
)
from slime_trainer_megatron.layout import Layout
from slime_trainer_megatron.process_groups import ProcessGroups
from slime_trainer_megatron.weights.parameters import named_global_parameters
from slime_trainer_megatron.weights.weights_in import load_hf
from slime_trainer_megatron.weights.weights_out import hf_weights
from torch import nn

from slime_core.errors import CheckpointError, ConfigError
from slime_core.models.hf_io import copy_assets, read_weights, write_weights
from tests.megatron_models import FAMILIES, chunks_of, family, save_tiny


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """Megatron's groups of one process."""
    groups = ProcessGroups(Layout(), "cpu")
    yield
    groups.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    save_tiny(directory, "qwen3")
    return directory


def weights(chunks: list[Any]) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for chunk in chunks for name, p in chunk.named_parameters()}


@pytest.mark.parametrize("variant", FAMILIES)
def test_there_and_back_is_bitwise_and_logits_are_transformers(variant: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, variant, shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = family(tmp_path)
    chunks = chunks_of(model)
    assert load_hf(chunks, model, tmp_path) == []
    found = dict(hf_weights(chunks, model, bucket_bytes=5000))
    files = dict(read_weights(tmp_path))
    assert found.keys() == files.keys()
    assert all(torch.equal(found[name], files[name]) for name in files)
    ids = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), on_device("cpu"):
        logits = chunks[0].eval()(ids, torch.arange(17).expand(2, -1), None)
        expected = reference(ids).logits
    torch.testing.assert_close(logits[..., :61], expected, rtol=1e-4, atol=1e-4)


def test_a_critic_starts_with_a_fresh_head_and_keeps_its_own(saved: Path, tmp_path: Path) -> None:
    model = family(saved, "critic")
    chunks = chunks_of(model, role="critic")
    with pytest.raises(CheckpointError, match=r"score.weight: missing \(for output_layer.weight \(1, 32\)\)"):
        load_hf(chunks, model, saved)
    heads = ["score.weight", "score.bias"]
    assert load_hf(chunks, model, saved, missing_ok=heads.__contains__) == heads
    with torch.no_grad():
        chunks[0].output_layer.weight.fill_(0.5)
    copy_assets(saved, tmp_path)
    written = {name: tensor.clone() for name, tensor in hf_weights(chunks, model)}
    assert "lm_head.weight" not in written
    write_weights(tmp_path, written.items())
    again = chunks_of(model, role="critic")
    assert load_hf(again, model, tmp_path, missing_ok=heads.__contains__) == []
    assert weights(again)["output_layer.weight"].eq(0.5).all()
    # A reward model with a head for two classes: a critic does not use it.
    write_weights(tmp_path, {**written, "score.weight": torch.ones(2, 32), "score.bias": torch.ones(2)}.items())
    fresh = chunks_of(model, role="critic")
    assert load_hf(fresh, model, tmp_path, missing_ok=heads.__contains__) == heads
    assert not weights(fresh)["output_layer.weight"].any()


def test_all_that_does_not_fit_is_said_at_once_and_nothing_is_loaded(saved: Path, tmp_path: Path) -> None:
    files = dict(read_weights(saved))
    del files["model.layers.1.self_attn.k_proj.weight"]
    files["model.layers.2.mlp.down_proj.weight"] = torch.zeros(32, 40)
    files["model.layers.0.self_attn.v_proj.weight"] = torch.zeros(15, 32)
    files["model.embed_tokens.weight"] = torch.zeros(60, 32)
    files["model.layers.9.more"] = torch.zeros(3)
    copy_assets(saved, tmp_path)
    write_weights(tmp_path, files.items())
    model = family(saved)
    chunks = chunks_of(model)
    before = weights(chunks)
    with pytest.raises(CheckpointError, match="5 tensors do not fit the model") as caught:
        load_hf(chunks, model, tmp_path)
    text = str(caught.value)
    assert "model.layers.1.self_attn.k_proj.weight: missing (for decoder.layers.1.self_attention.linear_qkv" in text
    assert (
        "model.layers.2.mlp.down_proj.weight (32, 40): all gives (32, 40), decoder.layers.2.mlp.linear_fc2.weight is"
        " (32, 48)"
    ) in text
    assert "model.layers.0.self_attn.v_proj.weight (15, 32): all gives they do not merge" in text
    assert "model.embed_tokens.weight (60, 32): all gives vocabulary of 61 in rows of (32,)" in text
    assert "model.layers.9.more (3,): in the files, not in the model" in text
    after = weights(chunks)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_that_is_quantized_by_blocks(saved: Path, tmp_path: Path) -> None:
    files, expected = dict(read_weights(saved)), {}
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in files.items():
        if not name.endswith("_proj.weight"):
            stored[name] = expected[name] = tensor
            continue
        scale = torch.rand(-(-tensor.shape[0] // 20), -(-tensor.shape[1] // 12)) + 0.5
        stored[name] = (tensor * 8).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        by_hand = stored[name].float()
        for row in range(scale.shape[0]):
            for column in range(scale.shape[1]):
                by_hand[row * 20 : row * 20 + 20, column * 12 : column * 12 + 12] *= scale[row, column]
        expected[name] = by_hand
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((saved / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [20, 12]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = family(tmp_path)
    chunks = chunks_of(model)
    load_hf(chunks, model, tmp_path)
    found = dict(hf_weights(chunks, model))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_map_that_does_not_fit_the_model_is_refused(saved: Path) -> None:
    model = family(saved)
    chunks = chunks_of(model)
    qkv = next(row for row in model.rows if "linear_qkv" in row.megatron)
    lacking = replace(model, rows=[row for row in model.rows if row is not qkv])
    with pytest.raises(ConfigError, match=r"4 parameters:\n  decoder.layers.0.*linear_qkv.weight.*: no row"):
        list(named_global_parameters(chunks, lacking))
    with pytest.raises(ConfigError, match=r"decoder.layers.3.self_attention.linear_qkv.weight: 2 rows"):
        list(hf_weights(chunks, replace(model, rows=[*model.rows, replace(qkv, layers=(3,))])))
    more = Row("decoder.layers.{layer}.mlp.router.weight", ("x.{layer}",), Whole(), "replicated", (1, 2))
    with pytest.raises(ConfigError, match=r"2 parameters that no rank has:\n  decoder.layers.1.mlp.router.weight"):
        load_hf(chunks, replace(model, rows=[*model.rows, more]), saved)


class Holder(nn.Module):
    """Parameters of any names, as modules that are not installed here have them."""

    def __init__(self, **parameters: int) -> None:
        super().__init__()
        for name, number in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.full((1,), float(number))))


def test_names_of_transformer_engine_are_those_of_the_local_spec() -> None:
    layer = nn.Module()
    layer.layer_number = 6  # type: ignore[assignment]
    layer.self_attention = nn.Module()
    layer.self_attention.linear_qkv = Holder(weight=0, layer_norm_weight=1)
    layer.self_attention.linear_proj = Holder(weight=2)
    layer.mlp = nn.Module()
    layer.mlp.local_expert_indices = [2, 3]  # type: ignore[assignment]
    layer.mlp.experts = nn.Module()
    layer.mlp.experts.linear_fc1 = Holder(weight0=3, weight1=4)
    layer.mlp.experts.linear_fc2 = Holder(weight0=5, weight1=6)
    layer.mlp.router = Holder(weight=7)
    layer.pre_mlp_layernorm = Holder(weight=8)
    chunk = nn.Module()
    chunk.decoder = nn.Module()
    chunk.decoder.layers = nn.ModuleList([layer])
    wrapped = nn.Module()
    wrapped.module = chunk
    hf = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 6, "num_attention_heads": 2}
    architecture = decoder_architecture(hf, num_moe_experts=4)
    model = MegatronModel(architecture, [*attention_rows(architecture), *expert_rows()])
    found = {named.name: int(named.parameter) for named in named_global_parameters([wrapped], model)}
    experts = "mlp.experts.local_experts"
    assert found == {
        f"decoder.layers.5.{name}.weight": number
        for number, name in enumerate(
            [
                *("self_attention.linear_qkv", "input_layernorm", "self_attention.linear_proj"),
                *(f"{experts}.{expert}.linear_fc{i}" for i in (1, 2) for expert in (2, 3)),
                *("mlp.router", "pre_mlp_layernorm"),
            ]
        )
    }
    dense = nn.Module()
    dense.layer_number = 1  # type: ignore[assignment]
    dense.mlp = nn.Module()
    dense.mlp.linear_fc1 = Holder(weight=0, layer_norm_weight=1)
    chunk.decoder.layers = nn.ModuleList([dense])
    model = MegatronModel(architecture, dense_mlp_rows(architecture))
    names = [named.name for named in named_global_parameters([chunk], model)]
    assert names == ["decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.pre_mlp_layernorm.weight"]
