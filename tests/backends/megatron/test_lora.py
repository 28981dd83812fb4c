"""Adapters over several ranks: what the embedded trainer learns, whatever the layout, and through checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slime_core.models.hf_io import read_weights
from tests.backends.megatron import lora_jobs
from tests.backends.megatron import trainer_jobs as jobs
from tests.backends.megatron.ranks import RankPool
from tests.backends.megatron.test_families import MODELS, TINY
from tests.megatron_models import save_tiny

pytestmark = pytest.mark.backends

Ranks = Callable[[int], RankPool]
HERE = lora_jobs.__name__
TP2, PP2, CP2, EP2 = (
    {f"{kind}_parallel_size": 2} for kind in ("tensor_model", "pipeline_model", "context", "expert_model")
)
SP = {"sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2": (2, TP2),
    "TP2+SP": (2, TP2 | SP),
    "TP2+SP, some matrices of a linear": (2, TP2 | SP | {"lora_target_modules": ["q_proj", "v_proj", "up_proj"]}),
    "PP2, recomputed": (2, PP2 | {"recompute_granularity": "full"}),
    "VPP2": (2, PP2 | {"num_layers_per_virtual_pipeline_stage": 1}),
    "CP2": (2, CP2),
    "DP2": (2, {}),
    "DP2 plain": (2, {"use_distributed_optimizer": False}),
    "DP2 overlapped": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "TP2+SP x PP2": (4, TP2 | PP2 | SP),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "dense", "qwen3-tied", vocab_size=jobs.VOCABULARY)
    save_tiny(root / "experts", "qwen3-moe-mixed", vocab_size=jobs.VOCABULARY)
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps(ranks: Ranks, models: dict[str, Path], tmp_path: Path, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    targets = {name: value for name, value in flags.items() if name.startswith("lora_")}
    expected = lora_jobs.embedded(models["dense"], tmp_path / "embedded", **targets)
    kwargs: dict[str, Any] = {"model": str(models["dense"]), "directory": str(tmp_path / "megatron"), **flags}
    lora_jobs.compare_adapters(ranks(world_size).run(f"{HERE}:megatron", **kwargs), expected)


@pytest.mark.parametrize("layout", [EP2, TP2 | SP], ids=["EP2", "TP2+SP"])
def test_experts(ranks: Ranks, models: dict[str, Path], tmp_path: Path, layout: dict[str, Any]) -> None:
    expected = lora_jobs.embedded(models["experts"], tmp_path / "embedded")
    kwargs: dict[str, Any] = {"model": str(models["experts"]), "directory": str(tmp_path / "megatron"), **layout}
    lora_jobs.compare_adapters(ranks(2).run(f"{HERE}:megatron", **kwargs), expected)


FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek-v3-dense": {},
    "moonlight": {"num_experts_per_tok": 8},
    "qwen3-next": {},
}
"""Model -> further entries of its config.json."""


@pytest.mark.parametrize("family", FAMILIES)
def test_families(ranks: Ranks, tmp_path: Path, family: str) -> None:
    """One rank against transformers with W + scale * B A from the files, and two ranks against one."""
    model_type, entries = MODELS[family]
    torch.manual_seed(0)
    sizes = {**TINY, **entries, **FAMILIES[family], "vocab_size": jobs.VOCABULARY, "initializer_range": 0.1}
    config = AutoConfig.for_model(model_type, **deepcopy(sizes))
    build: Any = AutoModelForCausalLM.from_config
    build(config).save_pretrained(tmp_path / "model")
    flags: dict[str, Any] = {"model": str(tmp_path / "model"), "rollout_temperature": 1.0}
    (one,) = ranks(1).run(f"{HERE}:megatron", directory=str(tmp_path / "one"), **flags)
    base, merged = (dict(read_weights(tmp_path / name)) for name in ("model", "one"))
    adapters = one["adapters"]
    for name, tensor in base.items():
        module = name.removesuffix(".weight")
        adapted = "proj" in module.rpartition(".")[2] and ".experts." not in module
        assert (f"{module}.lora_A" in adapters) == adapted, name
        if adapted:
            tensor = tensor + 8.0 / 4 * adapters[f"{module}.lora_B"] @ adapters[f"{module}.lora_A"]
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-6 if adapted else 0, msg=name)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "one", attn_implementation="eager")
    data = jobs.batch()
    for tokens, response, log_probs in zip(data.tokens, data.response_lengths, one["after"], strict=True):
        ids = torch.tensor(tokens)
        with torch.no_grad():
            expected = torch.log_softmax(reference(ids[None], use_cache=False).logits[0, -response - 1 : -1], -1)
        picked = expected.gather(1, ids[-response:, None]).squeeze(1)
        torch.testing.assert_close(log_probs, picked, rtol=0, atol=1e-4)
    # Models with experts need sequence parallelism.
    for number, layout in enumerate([TP2 | SP] if any(".experts." in name for name in base) else [TP2 | SP, TP2]):
        found = ranks(2).run(f"{HERE}:megatron", directory=str(tmp_path / f"two {number}"), **flags, **layout)
        lora_jobs.compare_adapters(found, one)


@pytest.mark.parametrize("layout", [TP2 | SP, PP2, {}], ids=["TP2+SP", "PP2", "DP2"])
def test_a_checkpoint_goes_on(ranks: Ranks, models: dict[str, Path], tmp_path: Path, layout: dict[str, Any]) -> None:
    """Bit for bit in the same layout, and nearly so in another one."""
    flags: dict[str, Any] = {"model": str(models["dense"]), "directory": str(tmp_path / "checkpoint")}
    saved, loaded = (ranks(2).run(f"{HERE}:continued", loads=loads, **flags, **layout) for loads in (False, True))
    for before, after in zip(saved, loaded, strict=True):
        assert after["metrics"] == before["metrics"]
        assert all(torch.equal(a, b) for a, b in zip(after["ref"], before["ref"], strict=True))
        assert all(torch.equal(after["weights"][name], tensor) for name, tensor in before["weights"].items())
    assert not list(tmp_path.glob("checkpoint/trainer/model"))
    (other,) = ranks(1).run(f"{HERE}:continued", loads=True, **flags)
    assert other["metrics"] == pytest.approx(saved[0]["metrics"], rel=2e-4, abs=2e-6)
    for name, tensor in saved[0]["weights"].items():
        torch.testing.assert_close(other["weights"][name], tensor, rtol=0, atol=2e-4, msg=name)
