"""Adapters in Megatron's linears, in one process: against the embedded trainer, against PEFT, through checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from slime_embedded.trainer.trainer import EmbeddedTrainer
from slime_trainer_megatron.model.specs import RMSNorm
from slime_trainer_megatron.trainer import MegatronTrainer
from slime_trainer_megatron.weights.lora import _normed
from transformers import AutoModelForCausalLM

from slime_core.errors import CheckpointError
from tests.backends.megatron import trainer_jobs as jobs
from tests.backends.megatron.lora_jobs import LORA
from tests.megatron_models import save_tiny
from tests.unit.trainers.megatron.steps import Make, equal, log_probs, step

pytestmark = pytest.mark.slow

ADAPTER, MODEL = "adapter/adapter_model.safetensors", "model.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    variants: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("dense", "qwen3-tied", {}),
        ("other", "qwen3-tied", {"initializer_range": 0.2}),
        ("experts", "qwen3-moe-mixed", {}),
    )
    for name, variant, changes in variants:
        save_tiny(root / name, variant, vocab_size=jobs.VOCABULARY, num_hidden_layers=2, **changes)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def make(build: Make, models: dict[str, Path]) -> Make:
    return lambda model="dense", role="actor", **flags: build(models[model], role, **{**LORA, **flags})


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "up_proj"]])
def test_peft_opens_the_adapter_and_transformers_the_merged_model(
    make: Make, models: dict[str, Path], tmp_path: Path, targets: list[str]
) -> None:
    import peft

    trainer = make(lora_target_modules=targets, rollout_temperature=1.0)
    for _ in range(2):
        step(trainer)
    trainer.save(tmp_path)
    assert not (tmp_path / "trainer" / "model").exists(), "no second copy"
    data, position = jobs.batch(), 5
    ids, response = torch.tensor(data.tokens[position]), data.response_lengths[position]
    expected = log_probs(trainer)[position]
    base = AutoModelForCausalLM.from_pretrained(models["dense"])

    def found(model: Any) -> torch.Tensor:
        log_p = torch.log_softmax(model(ids[None]).logits[0, -response - 1 : -1], -1)
        return log_p.gather(1, ids[-response:, None]).squeeze(1)

    assert not torch.allclose(found(base), expected, atol=1e-2), "the adapters do something"
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    for model in (peft.PeftModel.from_pretrained(base, tmp_path / "adapter"), whole):
        torch.testing.assert_close(found(model), expected, rtol=0, atol=1e-5)


def test_the_reference_takes_no_copy_of_the_model_and_may_follow(make: Make) -> None:
    trainer = make(use_kl_loss=True, keep_old_actor=True)
    assert sum(t.numel() for t in trainer.models.sets.tensors("ref").values()) == trained_numbers(trainer)
    first = log_probs(trainer)
    step(trainer)
    after = log_probs(trainer)
    assert not equal(after, first)
    assert equal(log_probs(trainer, "ref"), first)
    assert equal(log_probs(trainer, "old_actor"), first)
    trainer.update_reference()
    trainer.update_old_actor()
    step(trainer)
    assert equal(log_probs(trainer, "ref"), after)
    assert equal(log_probs(trainer, "old_actor"), after)
    assert not equal(log_probs(trainer), after)


def trained_numbers(trainer: MegatronTrainer) -> int:
    return sum(p.numel() for chunk in trainer.models.chunks for p in chunk.parameters() if p.requires_grad)


def test_trainers_take_each_others_adapters(make: Make, models: dict[str, Path], tmp_path: Path) -> None:
    embedded = EmbeddedTrainer(jobs.settings(models["dense"], **LORA))
    step(embedded)
    embedded.save(tmp_path / "first")
    trainer = make(finetune=True)
    trainer.load(tmp_path / "first")
    trainer.save(tmp_path / "second")
    again = EmbeddedTrainer(jobs.settings(models["dense"], **LORA, finetune=True))
    again.load(tmp_path / "second")
    again.save(tmp_path / "third")
    assert len({(tmp_path / name / ADAPTER).read_bytes() for name in ("first", "second", "third")}) == 1


def test_what_does_not_fit_is_refused(make: Make, tmp_path: Path) -> None:
    plain = make(lora_rank=None)
    plain.save(tmp_path / "plain")
    plain.close()
    trainer = make()
    step(trainer)
    trainer.save(tmp_path / "adapted")
    with pytest.raises(CheckpointError, match=r"no adapters in it .* name it as --hf-checkpoint"):
        trainer.load(tmp_path / "plain")
    trainer.close()
    for change, message in (
        ({"model": "other"}, "trained on other weights than --hf-checkpoint .*other: merged, model"),
        ({"lora_alpha": 2.0}, "--lora-alpha was 8.0, is 2.0"),
        ({"lora_target_modules": ["q_proj"]}, r"unknown .*\.lora_A"),
    ):
        other = make(**change)
        with pytest.raises(CheckpointError, match=message):
            other.load(tmp_path / "adapted")
        other.close()


@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_norm_within_a_linear_is_the_norm_before_it(zero_centered: bool) -> None:
    """By the attributes that Transformer Engine's linears with a norm have."""
    config = SimpleNamespace(
        normalization="RMSNorm",
        params_dtype=torch.float32,
        layernorm_zero_centered_gamma=zero_centered,
        sequence_parallel=False,
    )
    norm = RMSNorm(config, 5, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 1, 5))
    x = torch.randn(3, 1, 5, generator=torch.Generator().manual_seed(0))
    linear = SimpleNamespace(
        layer_norm_weight=norm.weight, normalization="RMSNorm", eps=1e-5, zero_centered_gamma=zero_centered
    )
    torch.testing.assert_close(_normed(linear, x), norm(x))
    assert _normed(SimpleNamespace(), x) is x
