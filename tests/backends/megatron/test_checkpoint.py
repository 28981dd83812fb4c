"""Checkpoints over several ranks: bit for bit in one layout, to rounding in another; and models converted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.backends.megatron import checkpoint_jobs as jobs
from tests.backends.megatron import trainer_jobs
from tests.backends.megatron.ranks import RankError, RankPool
from tests.megatron_models import save_tiny

pytestmark = pytest.mark.backends

Ranks = Callable[[int], RankPool]
TP2, PP2, CP2 = ({f"{kind}_parallel_size": 2} for kind in ("tensor_model", "pipeline_model", "context"))
SP, VPP2 = {"sequence_parallel": True}, PP2 | {"num_layers_per_virtual_pipeline_stage": 1}
EP2 = {"expert_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "DP2": (2, {}),
    "TP2": (2, TP2),
    "TP2+SP": (2, TP2 | SP),
    "PP2": (2, PP2),
    "VPP2": (2, VPP2),
    "EP2": (2, EP2),
    "DP2 plain": (2, {"use_distributed_optimizer": False}),
    "DP2 in buckets": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1000}),
    "TP2xPP2": (4, TP2 | PP2),
    "CP2xDP2": (4, CP2),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "dense", "qwen3-tied", vocab_size=trainer_jobs.VOCABULARY)
    save_tiny(root / "experts", "qwen3-moe", vocab_size=trainer_jobs.VOCABULARY)
    return {path.name: path for path in root.iterdir()}


Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def run(ranks: Ranks, models: dict[str, Path]) -> Run:
    def started(layout: str, model: str = "dense", **flags: Any) -> list[dict[str, Any]]:
        world_size, sizes = LAYOUTS[layout]
        return ranks(world_size).run(f"{jobs.__name__}:trained", model=str(models[model]), **sizes, **flags)

    return started


Saved = Callable[[str, str], tuple[Path, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def saved(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """(layout, model) -> a checkpoint after two steps, and what came of the run that went on; made once."""
    made: dict[tuple[str, str], tuple[Path, list[dict[str, Any]]]] = {}

    def save(layout: str, model: str) -> tuple[Path, list[dict[str, Any]]]:
        if (layout, model) not in made:
            directory = tmp_path_factory.mktemp("saved")
            made[layout, model] = (directory, run(layout, model, save=str(directory)))
        return made[layout, model]

    return save


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("TP2+SP", "dense"),
        ("DP2", "dense"),
        ("DP2 plain", "dense"),
        ("DP2 in buckets", "dense"),
        ("VPP2", "dense"),
        ("EP2", "experts"),
    ],
)
def test_in_one_layout_bit_for_bit(run: Run, saved: Saved, layout: str, model: str) -> None:
    directory, uninterrupted = saved(layout, model)
    for before, after in zip(uninterrupted, run(layout, model, load=str(directory)), strict=True):
        assert after["metrics"] == before["metrics"]
        assert after["weights"].keys() == before["weights"].keys()
        assert all(torch.equal(after["weights"][name], tensor) for name, tensor in before["weights"].items())
        assert all(torch.equal(*pair) for pair in zip(after["moments"], before["moments"], strict=True))
        for role, log_probs in before["frozen"].items():
            assert all(torch.equal(*pair) for pair in zip(after["frozen"][role], log_probs, strict=True))


@pytest.mark.parametrize(
    ("first", "second", "model"),
    [
        ("TP2", "PP2", "dense"),
        ("DP2", "TP2", "dense"),
        ("VPP2", "TP2+SP", "dense"),
        ("TP2+SP", "VPP2", "dense"),
        ("DP2 in buckets", "one", "dense"),
        ("TP2+SP", "TP2xPP2", "dense"),
        ("TP2", "CP2xDP2", "dense"),
        ("EP2", "one", "experts"),
        ("EP2", "PP2", "experts"),
        ("PP2", "EP2", "experts"),
    ],
)
def test_in_another_layout_to_rounding(run: Run, saved: Saved, first: str, second: str, model: str) -> None:
    directory, uninterrupted = saved(first, model)
    stored = load_file(directory / "model.safetensors")
    expected = uninterrupted[0]
    exact = run(second, model, load=str(directory), more=False)
    assert all(torch.equal(exact[0]["weights"][name], tensor) for name, tensor in stored.items())
    found = run(second, model, load=str(directory))
    for result in found:
        for step, wanted in zip(result["metrics"], expected["metrics"], strict=True):
            assert step == pytest.approx(wanted, rel=2e-4, abs=2e-6)
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(found[0]["weights"][name], tensor, rtol=0, atol=2e-4)
    for role in ("ref", "old_actor"):
        wanted_of, found_of = _by_sample(uninterrupted, role), _by_sample(found, role)
        for position, log_probs in wanted_of.items():
            torch.testing.assert_close(found_of[position], log_probs, rtol=0, atol=1e-5)


def _by_sample(results: list[dict[str, Any]], role: str) -> dict[int, torch.Tensor]:
    found = {}
    for result in results:
        part, _ = trainer_jobs.shares(result["size"])[result["rank"]]
        found |= dict(zip(part, result["frozen"][role], strict=True))
    return found


def test_moments_are_not_thrown_away(run: Run, saved: Saved) -> None:
    """Else the tests above could pass with a fresh optimizer."""
    directory, uninterrupted = saved("TP2", "dense")
    fresh = run("TP2", load=str(directory), no_load_optim=True)
    assert fresh[0]["metrics"][-1]["loss"] != pytest.approx(uninterrupted[0]["metrics"][-1]["loss"], rel=2e-4)


def test_a_padded_vocabulary_may_be_padded_otherwise(run: Run, saved: Saved, tmp_path: Path) -> None:
    """61 tokens in 62 rows over two ranks, and in 61 on one."""
    directory, uninterrupted = saved("TP2", "dense")
    found = run("one", load=str(directory), make_vocab_size_divisible_by=16)
    for step, wanted in zip(found[0]["metrics"], uninterrupted[0]["metrics"], strict=True):
        assert step == pytest.approx(wanted, rel=2e-4, abs=2e-6)


CONVERTED = {
    "qwen3-moe": TP2 | SP | EP2 | {"expert_tensor_parallel_size": 1},
    "glm4.5": PP2 | {"decoder_first_pipeline_num_layers": 1},
    "deepseek-v3": TP2 | SP | {"expert_tensor_parallel_size": 1},
}


@pytest.mark.parametrize("name", CONVERTED)
def test_there_and_back_is_bitwise(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Written by one layout, read by one process, with what the model only carries along."""
    from safetensors.torch import save_file

    from tests.backends.megatron.test_families import save

    if name == "qwen3-moe":
        save_tiny(tmp_path / "hf", name)
    else:
        save(name, tmp_path / "hf")
    stored = load_file(tmp_path / "hf/model.safetensors")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    if name != "qwen3-moe":
        layer = config["num_hidden_layers"]
        stored[f"model.layers.{layer}.eh_proj.weight"] = torch.randn(4, 8)
        (tmp_path / "hf/config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
        save_file(stored, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    job, hf = f"{jobs.__name__}:converted", str(tmp_path / "hf")
    ranks(2).run(job, action="hf-to-megatron", hf_checkpoint=hf, save=str(tmp_path / "megatron"), **CONVERTED[name])
    back = {"load": str(tmp_path / "megatron"), "hf_checkpoint": hf}
    ranks(1).run(job, action="megatron-to-hf", save=str(tmp_path / "back"), **back)
    found = load_file(tmp_path / "back/model.safetensors")
    assert found.keys() == stored.keys()
    assert all(found[key].dtype == tensor.dtype and torch.equal(found[key], tensor) for key, tensor in stored.items())
    with pytest.raises(RankError, match="is there already"):
        ranks(1).run(job, action="megatron-to-hf", save=str(tmp_path / "back"), **back)


def test_a_model_quantised_by_blocks_comes_back_multiplied_out(ranks: Ranks, tmp_path: Path) -> None:
    """Also what it only carries along; `config.json` no longer says that it is quantised."""
    from safetensors.torch import save_file

    from tests.backends.megatron.test_families import save

    hf = tmp_path / "hf"
    save("deepseek-v3", hf)
    config = json.loads((hf / "config.json").read_text())
    stored = load_file(hf / "model.safetensors")
    stored[f"model.layers.{config['num_hidden_layers']}.mlp.down_proj.weight"] = torch.randn(16, 8)
    files, expected = {}, {}
    for name, tensor in stored.items():
        files[name] = expected[name] = tensor
        if name.endswith("_proj.weight"):
            scale = torch.rand(-(-tensor.shape[0] // 8), -(-tensor.shape[1] // 8)) + 0.5
            files[name], files[f"{name}_scale_inv"] = (tensor * 8).to(torch.float8_e4m3fn), scale
            blocks = scale.repeat_interleave(8, 0).repeat_interleave(8, 1)[: tensor.shape[0], : tensor.shape[1]]
            expected[name] = files[name].float() * blocks
    save_file(files, hf / "model.safetensors", metadata={"format": "pt"})
    quantised = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    changed = {"num_nextn_predict_layers": 1, "quantization_config": quantised}
    (hf / "config.json").write_text(json.dumps({**config, **changed}))
    job = f"{jobs.__name__}:converted"
    there, back = str(tmp_path / "megatron"), tmp_path / "back"
    ranks(1).run(job, action="hf-to-megatron", hf_checkpoint=str(hf), save=there, dtype="float32")
    ranks(1).run(job, action="megatron-to-hf", load=there, hf_checkpoint=str(hf), save=str(back))
    found = load_file(back / "model.safetensors")
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
