"""PPO end to end: a critic beside the actor that is saved, resumed and data parallel like it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.backends.whole_runs import hold, running
from tests.conftest import SLIME, TinyRun
from tests.run_files import last_commit, timeless

ROLLOUTS = 4
FLAGS = {
    "num_rollout": ROLLOUTS,
    "save_interval": 2,
    "advantage_estimator": "ppo",
    "critic_lr": 0.01,
    "num_critic_only_steps": 1,
    "partial_rollout": True,
    "over_sampling_batch_size": 6,
    "gamma": 0.99,
    "lambd": 0.95,
    "kl_coef": 0.01,
    # Adam divides gradients that are rounding noise by themselves; this keeps two processes comparable with one.
    "adam_eps": "1e-3",
}


def _commit(run_dir: Path, rollout: int = ROLLOUTS - 1) -> Path:
    return run_dir / "checkpoints" / f"rollout_{rollout:07d}"


@pytest.fixture(scope="module")
def unkilled(tiny: TinyRun, slime: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("unkilled") / "run"
    slime("train", *tiny.argv(save, **FLAGS))
    return save


def test_the_critic_learns_first_and_is_in_the_checkpoint(unkilled: Path) -> None:
    trained = [line for line in timeless(unkilled) if "train/critic-value_loss" in line]
    assert ["train/loss" in line for line in trained] == [False] + [True] * (ROLLOUTS - 1)
    assert any(line["rollout/groups_given_back"] for line in trained)
    for line in trained:
        assert {"rollout/values", "rollout/advantages", "train/critic-value_clipfrac"} <= line.keys()
        assert line["train/critic-lr"] == 0.01
    assert trained[0]["rollout/values"] == 0.0
    assert trained[-1]["rollout/values"] != 0.0
    weights = load_file(_commit(unkilled) / "critic" / "model.safetensors")
    assert weights["score.weight"].any()
    assert (_commit(unkilled) / "critic" / "trainer" / "optimizer.safetensors").is_file()


@pytest.mark.slow
def test_killed_and_resumed_is_bitwise_the_same(tiny: TinyRun, unkilled: Path, tmp_path: Path, slime: Any) -> None:
    save = tmp_path / "run"
    argv = [SLIME, "train", *tiny.argv(save, **FLAGS, load=save)]
    held = ["--custom-rollout-log-function-path", hold(tmp_path, ROLLOUTS - 1)]  # it stays until it is killed
    with running([*argv, *held], tmp_path, tmp_path / "log") as run:
        run.until("rollout 3/")
        run.kill()
    done = slime(*argv[1:])
    assert "2 of 4 rollouts done" in done.stdout
    assert timeless(save) == timeless(unkilled)
    assert last_commit(save, ()) == last_commit(unkilled, ())


@pytest.mark.slow
def test_a_critic_goes_on_from_another_runs(tiny: TinyRun, unkilled: Path, tmp_path: Path, slime: Any) -> None:
    critic = _commit(unkilled) / "critic"
    flags = {**FLAGS, "num_rollout": 1, "critic_load": critic, "eval_interval": None, "eval_prompt_data": None}
    slime("train", *tiny.argv(tmp_path / "run", **flags))
    (line,) = timeless(tmp_path / "run")
    assert line["rollout/values"] != 0.0
