"""SIGTERM in the middle of a training run: it commits, exits 0, and its continuation ends as if nothing had been."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Slime, TinyRun
from tests.run_files import last_commit, timeless

ROLLOUTS = 4
FLAGS: dict[str, Any] = {
    "num_rollout": ROLLOUTS, "save_interval": 3, "eval_interval": None, "eval_prompt_data": None,
    "rollout_max_response_len": 6,
}  # fmt: skip
SIGNALS = '''
import itertools, os, signal, threading, time
import psutil
from slime_core.launch import drain
from slime_core.rollout.pool import generate_rollout

CALLS = itertools.count(1)  # threads call, and none may take another's number
SENT = threading.Event()

def once():
    """SIGTERM to this process, in the call of that number; whether this was it."""
    if next(CALLS) != int(os.environ.get("CALL", "0")):
        return False
    for pid in whom():
        os.kill(pid, signal.SIGTERM)
    SENT.set()
    return True

def whom():
    """This process; with several ranks, the one that started them, or that and all ranks."""
    if "RANK_PID_OF_SLIME" not in os.environ:
        return [os.getpid()]
    parent = psutil.Process().parents()[2].pid  # beyond the two processes of the guard
    if os.environ["WHOM"] == "parent":
        return [parent]
    return [parent, *(child.pid for child in psutil.Process(parent).children(recursive=True))]

def sampled(args, sample):
    """Called for each sample, when its response is there."""
    if once() and "RANK_PID_OF_SLIME" in os.environ:  # the signal of the parent may come late, after the run
        until_asked()

def until_asked():
    end = time.monotonic() + 60
    while not drain.current().asked and time.monotonic() < end:
        time.sleep(0.01)

def evaluated(args, sample, evaluation):
    """Called for each sample; returns when the signal has been seen, of the samples after it, too."""
    if evaluation and (once() or SENT.is_set()):
        until_asked()

def postprocess(args, rollout_id, data):
    """Called in the training step of each rollout."""
    once()

def stuck(args, rollout_id, data_source, evaluation=False):
    """A plain rollout function, which nothing interrupts."""
    once()
    time.sleep(60)
'''


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drain") / "signals.py"
    path.write_text(SIGNALS)
    return path


@pytest.fixture(scope="module")
def whole(tiny: TinyRun, functions: Path, zygote: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody asks to end."""
    save = tmp_path_factory.mktemp("whole") / "run"
    done = zygote.run(["train", *tiny.argv(save, **FLAGS)], dict(os.environ), 120)
    assert done.returncode == 0, done.stderr
    return save


@pytest.mark.parametrize(
    ("flag", "call", "done"),
    [
        # 16 samples a rollout: in rollout 2; in rollout 3, so that the commit of rollout 2 is made again
        pytest.param("rollout_sample_hook_path=sampled", 40, 2, marks=pytest.mark.slow),
        pytest.param("rollout_sample_hook_path=sampled", 50, 3, marks=pytest.mark.slow),
        ("rollout_data_postprocess_path=postprocess", 2, 2),
    ],
    ids=["generating", "generating after a commit", "training"],
)
def test_what_was_trained_is_committed_and_goes_on(
    tiny: TinyRun, functions: Path, whole: Path, tmp_path: Path, slime: Slime, flag: str, call: int, done: int
) -> None:
    name, function = flag.split("=")
    save = tmp_path / "run"
    argv = tiny.argv(save, **FLAGS, **{name: f"{functions}:{function}"})
    first = slime("train", *argv, CALL=str(call))
    assert first.stderr.startswith("slime: SIGTERM: ending with a commit of what is trained, within 300 s")
    assert first.stderr.count("\n") == 1
    assert f"ended early: {done} of {ROLLOUTS} rollouts done and committed; the same command" in first.stdout
    assert f"--load {save} goes on from there" in first.stdout
    assert json.loads((save / "summary.json").read_text())["drained"] is True
    assert [line["step"] for line in timeless(save)] == list(range(1, done + 1))
    commits = sorted(path.name for path in (save / "checkpoints").glob("rollout_*"))
    assert commits == [f"rollout_{done - 1:07d}" + (".01" if done == 3 else "")]
    second = slime("train", *argv, "--load", save)
    assert f"resumed from {save}/checkpoints/{commits[0]}: {done} of {ROLLOUTS} rollouts done" in second.stdout
    assert json.loads((save / "summary.json").read_text())["drained"] is False
    assert timeless(save) == timeless(whole)
    assert last_commit(save) == last_commit(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "done", "extra"),
    [
        (5, 2, {}),  # of the first evaluation's 8 samples
        pytest.param(13, 4, {}, marks=pytest.mark.slow),  # after the last rollout
        pytest.param(5, 0, {"skip_eval_before_train": None}, marks=pytest.mark.slow),  # before the first
        pytest.param(5, 2, {"async": True}, marks=pytest.mark.slow),
        pytest.param(
            5, 2, {"train_backend": "embedded", "actor_num_gpus_per_node": 2, "device": "cpu"}, marks=pytest.mark.slow
        ),
    ],
    ids=["between", "last", "first", "async", "ranks"],
)
def test_an_evaluation_is_interrupted_and_done_by_the_continuation(
    tiny: TinyRun, functions: Path, tmp_path: Path, slime: Slime, call: int, done: int, extra: dict[str, Any]
) -> None:
    save = tmp_path / "run"
    flags = {
        "num_rollout": ROLLOUTS, "save_interval": 3, "rollout_max_response_len": 6, "skip_eval_before_train": True,
    }  # fmt: skip
    argv = tiny.argv(save, **flags | extra, rollout_sample_hook_path=f"{functions}:evaluated")
    first = slime("train", *argv, CALL=str(call), WHOM="parent")
    assert f"{done} of {ROLLOUTS} rollouts done" in first.stdout, first.stdout
    if done == 0:
        assert "nothing to keep yet" in first.stdout
        return
    assert [line["step"] for line in timeless(save)] == list(range(1, done + 1))
    assert not any(key.startswith("eval/") for key in timeless(save)[-1])
    (commit,) = [c for c in (save / "checkpoints").glob("rollout_*") if c.name.endswith(str(done - 1))]
    assert json.loads((commit / "state.json").read_text())["unfinished_evaluations"] == [done]
    with (save / "metrics.jsonl").open("a") as file:  # as a continuation leaves it that was killed after the evaluation
        file.write(json.dumps({"step": done, "eval/held": 0.0}) + "\n")
    second = slime("train", *argv, "--load", save)
    assert "ended early" not in second.stdout
    evaluated = [line["step"] for line in timeless(save) if "eval/held" in line]
    assert evaluated == [2, 4]
    summary = json.loads((save / "summary.json").read_text())
    assert (summary["drained"], summary["rollouts"]) == (False, ROLLOUTS)


def test_partial_rollouts_keep_what_was_generated(tiny: TinyRun, functions: Path, tmp_path: Path, slime: Slime) -> None:
    save = tmp_path / "run"
    flags = {**FLAGS, "partial_rollout": True, "rollout_sample_hook_path": f"{functions}:sampled"}
    slime("train", *tiny.argv(save, **flags), CALL="24")
    state = json.loads((save / "checkpoints" / "rollout_0000000" / "data_source.json").read_text())
    kept = state["data_source"]["buffer"]["state"]["groups"]
    assert [group[0]["group_index"] for group in kept] == [4, 5, 6, 7]
    assert any(sample["response_length"] for group in kept for sample in group)


def test_before_the_first_step_there_is_nothing_to_keep(
    tiny: TinyRun, functions: Path, tmp_path: Path, slime: Slime
) -> None:
    flags = {**FLAGS, "rollout_sample_hook_path": f"{functions}:sampled"}
    done = slime("train", *tiny.argv(tmp_path / "run", **flags), CALL="1")
    assert "0 of 4 rollouts done, so there is nothing to keep yet; the same command with --overwrite" in done.stdout
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_deadline_ends_the_run_as_before(tiny: TinyRun, functions: Path, tmp_path: Path, slime: Slime) -> None:
    flags = {**FLAGS, "rollout_function_path": f"{functions}:stuck", "drain_timeout": 0.3}
    done = slime("train", *tiny.argv(tmp_path / "run", **flags), check=False, CALL="1")
    assert done.returncode == 143
    said = done.stderr.splitlines()
    assert said[-1] == "slime: ended by SIGTERM"
    assert said[-2].startswith("slime: not done 0.3 s after SIGTERM (--drain-timeout): ending without a commit")
