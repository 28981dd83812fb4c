"""HF -> Megatron -> HF in one process: names, numbers, and what is said of checkpoints and maps that do not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from slime_trainer_megatron.cpu_mode import on_device
from slime_trainer_megatron.families import (
    QKV,
    Columns,
    Gated,
    GatedFused,
    MegatronModel,
    Merge,
    Row,
    Rows,
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
from tests.sweeps import sweep


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


def tree(parts: Any) -> nn.Module:
    """Modules of these names, as those have them that are not installed here; a list of names is parameters."""
    made = nn.Module()
    for name, value in parts.items() if isinstance(parts, dict) else ():
        setattr(made, name, tree(value))
    for name in parts if isinstance(parts, list) else ():
        made.register_parameter(name, nn.Parameter(torch.zeros(1)))
    return made


def test_names_of_transformer_engine_are_those_of_the_local_spec() -> None:
    normed = ["weight", "layer_norm_weight"]
    moe = tree(
        {
            "self_attention": {"linear_qkv": normed, "linear_proj": ["weight"]},
            "mlp": {"experts": {f"linear_fc{i}": ["weight0", "weight1"] for i in (1, 2)}, "router": ["weight"]},
            "pre_mlp_layernorm": ["weight"],
        }
    )
    dense = tree({"mlp": {"linear_fc1": normed}})
    moe.layer_number, moe.mlp.local_expert_indices, dense.layer_number = 6, [2, 3], 1  # type: ignore
    chunk = tree({"module": {"decoder": {}}})
    chunk.module.decoder.layers = nn.ModuleList([moe])  # type: ignore[union-attr]
    hf = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 6, "num_attention_heads": 2}
    architecture = decoder_architecture(hf, num_moe_experts=4)
    model = MegatronModel(architecture, [*attention_rows(architecture), *expert_rows()])
    experts = [f"mlp.experts.local_experts.{expert}.linear_fc{i}" for i in (1, 2) for expert in (2, 3)]
    names = [
        *("self_attention.linear_qkv", "input_layernorm", "self_attention.linear_proj", *experts),
        *("mlp.router", "pre_mlp_layernorm"),
    ]
    found = [named.name for named in named_global_parameters([chunk], model)]
    assert found == [f"decoder.layers.5.{name}.weight" for name in names]
    chunk.module.decoder.layers = nn.ModuleList([dense])  # type: ignore[union-attr]
    model = MegatronModel(architecture, dense_mlp_rows(architecture))
    names = [named.name for named in named_global_parameters([chunk], model)]
    assert names == ["decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.pre_mlp_layernorm.weight"]


# -- merges against layouts written out by hand, and what the row helpers name ---------------------------

HF = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def labelled(start: int, rows: int, columns: int = 3) -> torch.Tensor:
    """Row i is all `start + i`, so that a row says where it came from."""
    return (start + torch.arange(rows)).float()[:, None].expand(rows, columns).contiguous()


def rows_of(tensor: torch.Tensor) -> list[int]:
    return [int(value) for value in tensor[:, 0]]


def test_queries_keys_and_values_are_interleaved_by_group() -> None:
    # 4 heads in 2 groups, head_dim 2: queries 0..7, keys 100..103, values 200..203.
    tensors = [labelled(0, 8), labelled(100, 4), labelled(200, 4)]
    merged = QKV(4, 2, 2).to_megatron(tensors, 0, 1)
    assert rows_of(merged) == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
    assert rows_of(QKV(4, 2, 2).to_megatron(tensors, 1, 2)) == rows_of(merged)[8:]
    assert rows_of(QKV(4, 2, 2).to_megatron(tensors, 1, 4)) == rows_of(merged)[4:8]  # a part of a group


def test_gates_of_the_attention_come_after_the_queries_of_their_group() -> None:
    # HF: head by head its query (2 rows), then its gate (2 rows).
    tensors = [labelled(0, 16), labelled(100, 4), labelled(200, 4)]
    merged = QKV(4, 2, 2, gated=True).to_megatron(tensors, 0, 1)
    first = [0, 1, 4, 5, 2, 3, 6, 7, 100, 101, 200, 201]
    assert rows_of(merged)[:12] == first
    back = QKV(4, 2, 2, gated=True).to_hf([merged])
    assert all(torch.equal(one, other) for one, other in zip(back, tensors))


def test_every_rank_has_its_gate_above_its_up_projection() -> None:
    gate, up = labelled(0, 4), labelled(10, 4)
    assert rows_of(Gated().to_megatron([gate, up], 0, 2)) == [0, 1, 10, 11]
    assert rows_of(Gated().to_megatron([gate, up], 1, 2)) == [2, 3, 12, 13]
    fused = torch.cat([gate, up])
    assert torch.equal(GatedFused().to_megatron([fused], 1, 2), Gated().to_megatron([gate, up], 1, 2))


CASES: list[tuple[Merge, list[tuple[int, ...]]]] = [
    (Columns(), [(8, 6)]),
    (Columns(), [(8,)]),
    (Rows(), [(6, 8)]),
    (Gated(), [(8, 6), (8, 6)]),
    (Gated(), [(8,), (8,)]),
    (GatedFused(), [(16, 6)]),
    (QKV(8, 4, 2), [(16, 6), (8, 6), (8, 6)]),
    (QKV(8, 4, 2), [(16,), (8,), (8,)]),
    (QKV(8, 1, 2), [(16, 6), (2, 6), (2, 6)]),
    (QKV(8, 4, 2, gated=True), [(32, 6), (8, 6), (8, 6)]),
]


@sweep("size, case, dtype", product([1, 2, 4], range(len(CASES)), [torch.float32, torch.bfloat16]))
def test_the_way_back_loses_no_bit_and_slices_are_the_same(case: int, size: int, dtype: torch.dtype) -> None:
    merge, shapes = CASES[case]
    whole = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype) for i, shape in enumerate(shapes)]
    parts = [merge.to_megatron(whole, rank, size) for rank in range(size)]
    back = merge.to_hf(parts)
    assert all(torch.equal(one, other) for one, other in zip(back, whole, strict=True))
    axis = merge.read_axis(size)
    if axis is not None:
        for rank, part in enumerate(parts):
            cut = [tensor.chunk(size, axis)[rank] for tensor in whole]
            assert torch.equal(merge.to_megatron(cut, 0, 1), part)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; allowed: silu"),
        ({"rope_scaling": {"type": "yarn"}}, "rope type 'yarn' is not supported; allowed: default, llama3"),
    ],
)
def test_what_megatron_would_compute_otherwise_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder_architecture({**HF, **change})
