"""`run_loop`: a real run in this process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from slime_testing_contracts import LoopRun

from slime_core.errors import ConfigError, PluginError

REWARD = "def reward(args, sample):\n    return 1.0 if '7' in sample.response else 0.0\n"


def test_what_a_run_leaves(run_loop: Callable[..., LoopRun], tmp_path: Path) -> None:
    threads, states = torch.get_num_threads(), (random.getstate(), torch.get_rng_state().tolist())
    (tmp_path / "my_rm.py").write_text(REWARD)
    run = run_loop(steps=2, custom_rm_path=tmp_path / "my_rm.py", rollout_batch_size=2)
    assert torch.get_num_threads() == threads
    assert (random.getstate(), torch.get_rng_state().tolist()) == states
    assert len(run.steps) == len(run.samples) == 2
    assert [len(samples) for samples in run.samples] == [8, 8]
    for step, samples in zip(run.steps, run.samples):
        rewards = [sample.reward for sample in samples]
        assert rewards == [float("7" in sample.response) for sample in samples]
        assert step["rollout/raw_reward"] == pytest.approx(sum(rewards) / 8)
    assert run.metric("train/grad_norm") == [step["train/grad_norm"] for step in run.steps]
    assert run.run_dir.parent.parent == tmp_path
    assert run.summary["rollouts"] == 2
    assert run.weight_checksums.keys() == run.weights.keys()
    assert run.evaluations == []


@pytest.mark.slow
def test_runs_are_equal_bit_for_bit_and_learn(run_loop: Callable[..., LoopRun]) -> None:
    one, other = run_loop(steps=8, seed=5), run_loop(steps=8, seed=5)
    assert one.run_dir != other.run_dir
    assert one.weight_checksums == other.weight_checksums
    assert one.metric("rollout/raw_reward") == other.metric("rollout/raw_reward")
    rewards = one.metric("rollout/raw_reward")
    assert sum(rewards[-2:]) > sum(rewards[:2])
    third = run_loop(steps=8, seed=6, rollout_seed=6)
    assert third.weight_checksums != one.weight_checksums


def test_evaluations_are_kept_apart(run_loop: Callable[..., LoopRun]) -> None:
    first = run_loop(steps=1)
    data = str(first.settings.prompt_data)
    run = run_loop(steps=1, eval_prompt_data=["held", data], eval_interval=1, eval_temperature=0.0)
    assert [sorted(scores)[0] for scores in run.evaluations] == ["eval/held", "eval/held"]
    assert len(run.steps) == 1


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"rollout_batch": 3}, ConfigError, "Did you mean rollout_batch_size?"),
        ({"advantage_estimator": "gpro"}, PluginError, "grpo"),
    ],
)
def test_wrong_settings_raise_slimes_errors(
    run_loop: Callable[..., LoopRun], settings: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        run_loop(**settings)
    assert message in str(raised.value)
