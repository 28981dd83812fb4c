"""Two gloo processes, with whole or sharded models, train as one does, agree bit for bit, and resume."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slime_embedded.models.decoder import init_weights

from slime_core.models.config import ModelConfig
from slime_core.models.hf_io import write_config, write_weights
from tests.ports import free_port

WORKER = Path(__file__).with_name("trainer_worker.py")
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


def run(job: dict[str, Any], save: Path, world_size: int, check: bool = True) -> str:
    """Run the workers to their end; returns their standard error."""
    save.mkdir(parents=True, exist_ok=True)
    path = save.with_suffix(".job.json")
    path.write_text(json.dumps({**job, "save": str(save)}))
    port = str(free_port())
    processes = []
    for rank in range(world_size):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(WORKER), str(path)]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        errors = "".join(process.communicate(timeout=120)[1] for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if check:
        assert [process.returncode for process in processes] == [0] * world_size, errors
    return errors


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
    trainer: str, more: dict[str, Any], job: dict[str, Any], tmp_path: Path
) -> None:
    """Compare with the embedded trainer in one process."""
    one, two, halves = tmp_path / "one", tmp_path / "two", tmp_path / "halves"
    job["args"] |= {name: value for name, value in more.items() if name.startswith(("lora", "model", "kl", "use"))}
    run(job, one, 1)
    job["trainer"] = trainer
    run(job, two, 2)
    expected, found = weights(one), weights(two)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6, msg=name)
    job["args"] |= more
    single = json.loads((one / "metrics_0.json").read_text())
    both = [json.loads((two / f"metrics_{rank}.json").read_text()) for rank in (0, 1)]
    assert both[0] == both[1]
    for a, b in zip(single, both[0], strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)

    run({**job, "batches": job["batches"][:2]}, tmp_path / "first", 2)
    run({**job, "batches": job["batches"][2:], "load": str(tmp_path / "first")}, halves, 2)
    resumed = weights(halves)
    exact = "save_dtype" not in more
    assert all(torch.equal(resumed[name], found[name].to(resumed[name].dtype)) for name in found)

    told = run({**job, "batches": job["batches"][2:], "load": str(tmp_path / "first")}, tmp_path / "alone", 1)
    assert "random states were saved by 2 processes and this run has 1" in told
    for name, tensor in weights(tmp_path / "alone").items():
        near = 1e-6 if exact else 1e-2
        torch.testing.assert_close(tensor.float(), found[name], rtol=near, atol=near, msg=name)
