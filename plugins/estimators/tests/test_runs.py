"""Whole runs on the embedded trainer: turns, parts of a reward, fan-out, partial rollouts, and a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from slime_testing_contracts.loop import LoopRun, run_loop
from slime_testing_contracts.tiny import write_rows

from tests.turn_worlds import FAN_OUT, WORLD

pytestmark = pytest.mark.slow
NAMES: dict[str, dict[str, Any]] = {
    **{name: {"advantage_estimator": name} for name in (
        "sapo", "gmpo", "dppo", "opo", "gdpo", "gigpo", "mt_grpo", "turn_credit"
    )},
    "ppo": {
        "advantage_estimator": "ppo", "critic_lr": 1e-2,
        "plugins": {"ppo": {"critic_lambd": 1.0, "length_alpha": 0.5}},
    },
    "vapo": {"advantage_estimator": "vapo", "critic_lr": 1e-2, "num_critic_only_steps": 1},
    "clip_cov": {"loss_type": "clip_cov", "plugins": {"clip_cov": {"share": 0.2, "low": 0.0}}},
    "kl_cov": {"loss_type": "kl_cov", "plugins": {"kl_cov": {"share": 0.2}}},
}  # fmt: skip


def run(folder: Path, steps: int, name: str, **more: Any) -> LoopRun:
    folder.mkdir(exist_ok=True)
    (folder / "world.py").write_text(WORLD)
    (folder / "fan_out.py").write_text(FAN_OUT)
    chosen = dict(NAMES[name])
    plugins = {"multi_turn": {"max_turn_tokens": 3, "reward": "sum"}, **chosen.pop("plugins", {})}
    flags: dict[str, Any] = {
        "prompt_data": write_rows(folder / "rows.jsonl", 64), "apply_chat_template": False, "label_key": None,
        "custom_generate_function_path": folder / "fan_out.py", "environment_path": folder / "world.py",
        "plugins": plugins, "custom_rm_path": None, "rollout_max_response_len": 40, "num_steps_per_rollout": 2,
        "over_sampling_batch_size": 6, "partial_rollout": True, "save_interval": 1, "seed": 5, **chosen, **more,
    }  # fmt: skip
    return run_loop(folder, steps, **flags)


def steps_of(done: LoopRun) -> list[dict[str, float]]:
    return [{k: v for k, v in step.items() if not k.startswith("perf/")} for step in done.steps]


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_run(tmp_path: Path, name: str) -> None:
    whole = run(tmp_path / "whole", 4, name)
    run(tmp_path / "parts", 2, name)
    parts = run(tmp_path / "parts", 4, name, load=tmp_path / "parts" / "run")
    assert steps_of(parts) == steps_of(whole)
    assert parts.weight_checksums == whole.weight_checksums
    turns = {len(sample.known_turns()) for samples in whole.samples for sample in samples}
    assert {1, 3} <= turns
    assert any(len({s.rollout_id for s in samples}) < len(samples) for samples in whole.samples), "no fan-out"
    trained = [step for step in whole.steps if "train/grad_norm" in step]
    assert len(trained) == 4 - NAMES[name].get("num_critic_only_steps", 0)
    assert all(step["train/grad_norm"] > 0 for step in trained)
