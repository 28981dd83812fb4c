"""`--async`, mode one-step: real training on a tiny model, and its commits."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from slime_testing_contracts.loop import LoopRun, run_loop
from slime_testing_contracts.tiny import write_rows

from slime_core.errors import ConfigError
from tests.conftest import Slime
from tests.run_files import metrics

ROOT = Path(__file__).parents[2]
STEPS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("data")
    held = write_rows(folder / "held.jsonl", 4)
    return {
        "prompt_data": write_rows(folder / "train.jsonl", 64),
        "eval_prompt_data": ["held", held],
        "eval_interval": 2,
        "save_interval": 1,
    }


@pytest.fixture(scope="module")
def whole(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> LoopRun:
    """A run with `--async` to its end, which leaves no thread behind."""
    before = set(threading.enumerate())
    run = run_loop(tmp_path_factory.mktemp("whole"), STEPS, async_training=True, **data)
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert [name for name in left if name.startswith("slime-rollout")] == []
    return run


def commit(run: LoopRun, rollout_id: int) -> Path:
    return run.run_dir / "checkpoints" / f"rollout_{rollout_id:07d}"


def evaluations(run: LoopRun) -> dict[int, float]:
    lines = metrics(run.run_dir)
    return {line["step"]: line["eval/held"] for line in lines if "eval/held" in line}


def test_every_rollout_but_the_first_is_one_version_behind(whole: LoopRun) -> None:
    assert whole.metric("rollout/staleness/max") == [0.0, 1.0, 1.0, 1.0]
    assert whole.metric("rollout/staleness") == [0.0, 1.0, 1.0, 1.0]
    assert whole.metric("rollout/staleness/hist_1") == [16.0] * 3
    versions = [sorted({v for s in rollout for v in s.token_weight_versions}) for rollout in whole.samples]
    assert versions == [[1], [1], [2], [3]]
    for name in ("perf/trainer_idle_fraction", "perf/rollout_idle_fraction"):
        assert all(0.0 <= value <= 1.0 for value in whole.metric(name))


def test_a_resumed_run_trains_on_the_rollout_that_waited(whole: LoopRun, data: dict[str, Any], tmp_path: Path) -> None:
    held = (commit(whole, 1) / "open_groups.jsonl").read_text().splitlines()
    assert {json.loads(line)["rollout_id"] for line in held} == {2}
    rest = run_loop(tmp_path, STEPS, async_training=True, load=commit(whole, 1), **data)
    assert rest.weight_checksums == whole.weight_checksums
    assert rest.metric("rollout/raw_reward") == whole.metric("rollout/raw_reward")[2:]
    assert rest.metric("rollout/staleness/max") == [1.0, 1.0]


def test_a_run_without_async_goes_on_with_it_too(whole: LoopRun, data: dict[str, Any], tmp_path: Path) -> None:
    rest = run_loop(tmp_path, STEPS, load=commit(whole, 1), **data)
    first, waited = ([s.index for s in run.samples[i]] for run, i in ((rest, 0), (whole, 2)))
    assert first == waited
    assert rest.metric("rollout/staleness") == [1.0, 0.0]


def test_weights_are_pushed_at_their_interval_and_evaluated_in_the_background(
    data: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**data, "update_weights_interval": 2, "eval_in_background": True, "async_training": True}
    run = run_loop(tmp_path / "a", STEPS, **settings)
    assert run.metric("rollout/staleness/max") == [0.0, 0.0, 1.0, 0.0]
    assert len(run.metric("perf/update_weights_time")) == 2
    assert sorted(evaluations(run)) == [0, 2, 4]
    # Between two updates the engines serve version 1, and the trainer has trained on: the next push is version 2.
    assert json.loads((commit(run, 0) / "state.json").read_text())["weight_version"] == 2
    state = json.loads((commit(run, 1) / "state.json").read_text())
    assert (state["weight_version"], state["unfinished_evaluations"]) == (2, [2])
    rest = run_loop(tmp_path / "b", STEPS, load=commit(run, 1), **settings)
    assert evaluations(rest) == {step: score for step, score in evaluations(run).items() if step}
    assert rest.weight_checksums == run.weight_checksums
    # Without --async the evaluation is made up for as well; here nothing else is left to do.
    last = run_loop(tmp_path / "c", 2, load=commit(run, 1), **data)
    assert evaluations(last) == {2: evaluations(run)[2]}


def test_train_async_py_is_slime_train_async(program: Slime) -> None:
    said = program(
        ROOT / "train_async.py", "--colocate", "--hf-checkpoint", "/m", "--prompt-data", "d", "--rm-type", "math",
        "--num-rollout", "1", "--rollout-batch-size", "1", "--rollout-max-response-len", "4", cwd=ROOT,
    )  # fmt: skip
    assert said.returncode == 2
    assert "--async (flag) and --colocate (flag) exclude each other" in said.stderr


def test_a_rollout_function_that_may_generate_is_refused_without_engine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--debug-train-only \(argument debug_train_only\) starts no engine"):
        run_loop(tmp_path, 2, debug_train_only=True, rollout_function_path="generate")
