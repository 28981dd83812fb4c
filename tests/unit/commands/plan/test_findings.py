"""Findings before a run: settings that rarely learn, and processes that a machine has no room for."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slime_commands.plan.check import slime_preflight

from slime_core.config.load import load_settings
from slime_core.protocols import TrainerTraits


def weights(directory: Path, parameters: int) -> Path:
    """The header of a safetensors file, which is all that is read of it."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [parameters], "data_offsets": [0, 0]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return directory


def found(model: Path, flags: str, *, processes: int = 1) -> list[str]:
    argv = f"--hf-checkpoint {model} --prompt-data p.jsonl --rm-type exact --num-rollout 3 --rollout-batch-size 4"
    argv += f" --n-samples-per-prompt 8 --rollout-max-response-len 16 --device cpu {flags}"
    settings = load_settings(argv.split(), env={})
    run: Any = SimpleNamespace(
        settings=settings,
        args=settings.args,
        processes=processes,
        parts=SimpleNamespace(trainer=type("Trainer", (), {"traits": TrainerTraits()})),
    )
    return [f"{finding.level.value} {finding.message}" for finding in slime_preflight(run=run)]


@pytest.mark.parametrize(
    ("parameters", "flags", "said"),
    [
        (135_000_000, "--lr 1e-6", "--lr 1e-06 (flag): with it, a model of 135M parameters hardly moves; begin with"),
        (135_000_000, "", "--lr 1e-06 (default): with it, a model of 135M"),
        (135_000_000, "--lr 2e-5", None),
        (135_000_000, "--lr 2e-3", "above 0.001, a model of 135M parameters unlearns; begin with --lr 2e-05"),
        (135_000_000, "--lr 2e-3 --lora-rank 8", None),
        (330_000, "--lr 2e-3", None),
        (330_000, "--lr 0.02", "above 0.01, a model of 0.33M parameters unlearns; begin with --lr 1e-04"),
        (330_000, "--lr 0", None),
        (7_000_000_000, "--lr 1e-6", None),
        (7_000_000_000, "--lr 1e-6 --rollout-temperature 2", "--rollout-temperature 2.0 (flag): answers are noise"),
        (7_000_000_000, "--lr 1e-6 --rollout-temperature 0.1", "the answers of a group are alike"),
        (7_000_000_000, "--lr 1e-6 --use-kl-loss --kl-loss-coef 100", "--kl-loss-coef 100.0 (flag): holds the policy"),
        (7_000_000_000, "--lr 1e-6 --use-kl-loss --kl-loss-coef 0.2", None),
        (7_000_000_000, "--lr 1e-6 --kl-coef 2 --advantage-estimator ppo", "--kl-coef 2.0 (flag): holds the policy"),
    ],
)  # fmt: skip
def test_settings_that_rarely_learn(tmp_path: Path, parameters: int, flags: str, said: str | None) -> None:
    warned = found(weights(tmp_path, parameters), flags)
    assert len(warned) == (said is not None), warned
    assert said is None or (warned[0].startswith("warning ") and said in warned[0])


@pytest.mark.parametrize(
    ("parameters", "processes", "memory_gib", "flags", "said"),
    [
        (135_000_000, 8, 1000, "", "error --actor-num-gpus-per-node 8 (default): 8 trainer processes, each with the"),
        (135_000_000, 2, 1000, "", None),
        (135_000_000, 2, 4, "", "2 cores, 4 GiB, of which they need 4.02 GiB; type --actor-num-gpus-per-node 1"),
        (135_000_000, 2, 4, "--lora-rank 8", None),
        (330_000, 8, 1000, "", "note 8 trainer processes share 2 cores; --actor-num-gpus-per-node 1 is faster"),
        (135_000_000, 8, 1000, "--launcher ray", None),
    ],
)  # fmt: skip
def test_processes_beyond_cores_and_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parameters: int, processes: int, memory_gib: int, flags: str,
    said: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("slime_embedded.trainer.settings.main_memory", lambda: memory_gib << 30)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    told = found(weights(tmp_path, parameters), f"--lr 5e-5 {flags}", processes=processes)
    assert len(told) == (said is not None), told
    assert said is None or said in told[0]
