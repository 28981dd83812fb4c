"""Two gloo processes, with whole or sharded models, train as one does, agree bit for bit, and resume."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slime_embedded.models.decoder import init_weights

from slime_core.models.config import ModelConfig
from slime_core.models.hf_io import write_config, write_weights
from tests.backends.megatron.conftest import ranks
from tests.backends.megatron.ranks import RankPool

__all__ = ["ranks"]
VOCAB = 31
HF: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    model, other = tmp_path / "model", tmp_path / "other"
    for seed, directory in enumerate((model, other)):
        write_weights(directory, init_weights(ModelConfig.from_hf(HF, qkv_bias=True), seed=seed).items())
        write_config(directory, HF)
    args = {"hf_checkpoint": str(model), "device": "cpu", "lr": 1e-2, "lr_decay_style": "constant"}
    # Keys' biases hardly matter, so their gradients are rounding noise: a small eps would blow it up to full steps.
    args |= {"distributed_timeout_minutes": 1, "clip_grad": 0.5, "adam_eps": 1e-3}
    teachers = {"on_policy_distillation": {"teachers": {"b": {"path": str(other)}}}}
    args |= {"opd_teacher_load": str(model), "plugins": teachers}  # read with --use-opd
    return {"args": args, "trainer": "embedded", "batches": [columns(seed) for seed in range(4)], "load": None}


def columns(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    responses = [rng.randint(1, 9) for _ in range(5)]  # one rank has a micro-batch more
    return {
        "rollout_id": seed,
        "tokens": [[rng.randrange(VOCAB) for _ in range(3 + n)] for n in responses],
        "response_lengths": responses,
        "loss_masks": [[1] * n for n in responses],
        "rewards": [rng.uniform(-1, 1) for _ in responses],
        "raw_rewards": [0.0] * 5,
        "truncated": [0] * 5,
        "sample_indices": list(range(5)),
        "group_indices": [0] * 5,
        "rollout_ids": list(range(5)),
        "rollout_mask_sums": responses,
        # Of one rank alone; read with --lora-adapters and --use-opd.
        "train_metadata": [None, {"adapter": "a", "teacher": "b"}, None, None, None],
    }


def weights(directory: Path) -> dict[str, torch.Tensor]:
    found = load_file(directory / "model.safetensors")
    for path in directory.glob("adapters/*/adapter_model.safetensors"):
        found |= {f"{path.parent.name}.{name}": tensor for name, tensor in load_file(path).items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "more"),
    [
        ("embedded", {}),
        ("embedded", {"lora_rank": 2, "lora_adapters": ["a"]}),
        ("fsdp", {}),
        ("fsdp", {"lora_rank": 4, "kl_coef": 0.1}),
        ("fsdp", {"use_opd": True}),
        ("fsdp", {"model_impl": "transformers", "recompute_granularity": "full", "save_dtype": "bfloat16"}),
    ],
)
def test_two_processes_train_as_one_and_resume(
    ranks: Callable[[int], RankPool], trainer: str, more: dict[str, Any], job: dict[str, Any], tmp_path: Path
) -> None:
    """Compare with the embedded trainer in one process."""

    def run(name: str, world_size: int, **changes: Any) -> list[Any]:
        (tmp_path / name).mkdir()
        given = {"job": {**job, **changes}, "save": str(tmp_path / name)}
        return ranks(world_size).run("tests.integration.trainer_worker:trained", deadline=120, **given)

    job["args"] |= {name: value for name, value in more.items() if name.startswith(("lora", "model", "kl", "use"))}
    ((single, _),) = run("one", 1)
    job["trainer"] = trainer
    (both, _), (other, _) = run("two", 2)
    expected, found = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6, msg=name)
    job["args"] |= more
    assert both == other
    for a, b in zip(single, both, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)

    run("first", 2, batches=job["batches"][:2])
    rest = {"batches": job["batches"][2:], "load": str(tmp_path / "first")}
    run("halves", 2, **rest)
    resumed = weights(tmp_path / "halves")
    exact = "save_dtype" not in more
    assert all(torch.equal(resumed[name], found[name].to(resumed[name].dtype)) for name in found)

    ((_, logged),) = run("alone", 1, **rest)
    assert any("random states were saved by 2 processes and this run has 1" in message for message in logged)
    for name, tensor in weights(tmp_path / "alone").items():
        near = 1e-6 if exact else 1e-2
        torch.testing.assert_close(tensor.float(), found[name], rtol=near, atol=near, msg=name)
