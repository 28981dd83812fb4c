"""`slime train` starts several training processes by itself, and none outlives it, however they end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import SLIME, Slime, TinyRun, without_start
from tests.run_files import metrics

SLOW = pytest.mark.slow
"""Starts interpreters for many seconds."""
PLACES = ("perf/",)

FAILS = '''
import os, signal

def postprocess(args, rollout_id, data):
    """Rank 1 goes wrong in the second rollout."""
    if os.environ["RANK"] == "1" and rollout_id == 1:
        {how}
'''
HOWS = {
    "bug.py": 'raise ValueError("nothing fits")',
    "crash.py": "os.kill(os.getpid(), signal.SIGKILL)",
    "exit.py": 'print("that was it", file=__import__("sys").stderr); os._exit(3)',
}


def weights(run_dir: Path) -> bytes:
    return (run_dir / "checkpoints" / "rollout_0000001" / "model.safetensors").read_bytes()


@pytest.fixture
def two(tiny: TinyRun, tmp_path: Path) -> Callable[..., list[str]]:
    """Flags of a run on two ranks."""

    def argv(save: str = "run", **changes: Any) -> list[str]:
        return tiny.argv(
            tmp_path / save,
            train_backend="embedded",
            **{"num_rollout": 2, "actor_num_gpus_per_node": 2, "device": "cpu", **changes},
        )

    return argv


@pytest.mark.slow
def test_they_train_as_those_of_torchrun_do(two: Callable[..., list[str]], tmp_path: Path) -> None:
    done = subprocess.run([SLIME, "train", *two("ours")], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    theirs = subprocess.run([*launcher, SLIME, "train", *two("theirs")], timeout=120, capture_output=True, text=True)
    assert theirs.returncode == 0, theirs.stderr[-3000:]
    assert metrics(tmp_path / "ours", PLACES) == metrics(tmp_path / "theirs", PLACES)
    assert weights(tmp_path / "ours") == weights(tmp_path / "theirs")
    state = json.loads((tmp_path / "ours/checkpoints/rollout_0000001/trainer/state.json").read_text())
    assert state["world_size"] == 2
    # Rank 0 speaks as one process does; the other has a file.
    words = [line.split()[0] for line in done.stdout.splitlines()]
    assert words == [line.split()[0] for line in theirs.stdout.splitlines()]
    assert without_start(done.stderr) == ""
    assert [path.name for path in (tmp_path / "ours/ranks").iterdir()] == ["rank_1.log"]


@SLOW
@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        (
            "bug.py",
            2,
            ["slime: error: rank 1 of 2: --rollout-data-post", "raised ValueError: nothing fits"],
        ),
        ("crash.py", 1, ["slime: error: rank 1 of 2 (process ", ") was killed by SIGKILL, by the system if memory"]),
        ("exit.py", 1, ["slime: error: rank 1 of 2 (process ", ") ended with exit status 3;", "\n  that was it\n"]),
    ],
)
def test_the_first_rank_to_fail_is_named(
    two: Callable[..., list[str]], tmp_path: Path, slime: Slime, how: str, status: int, said: list[str]
) -> None:
    (tmp_path / how).write_text(FAILS.format(how=HOWS[how]))
    started = time.monotonic()
    done = slime("train", *two(rollout_data_postprocess_path=f"{tmp_path / how}:postprocess"), check=False)
    assert time.monotonic() - started < 180  # not the other rank's ten minutes
    assert done.returncode == status
    for part in said:
        assert part in done.stderr
    assert [line.startswith("slime: error:") for line in done.stderr.splitlines()].count(True) == 1, done.stderr
    assert "rank 0" not in done.stderr
    assert "Connection closed" not in done.stderr


def ranks_among(below: list[psutil.Process]) -> list[psutil.Process]:
    """Without their guards."""
    return [child for child in below if "slime_core" in (words := child.cmdline()) and "--control" not in words]


@pytest.fixture
def running(two: Callable[..., list[str]]) -> Any:
    """The command in the middle of a run, and its ranks."""
    process = subprocess.Popen(
        [SLIME, "train", *two(num_rollout=1000)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("rollout "):
            break
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks_among(below)) == 2
    yield process, below
    for child in [psutil.Process(process.pid)] if process.poll() is None else []:
        child.kill()
    psutil.wait_procs(below, timeout=10)
    process.communicate()


@SLOW
@pytest.mark.parametrize(
    ("number", "status", "word"),
    [
        (signal.SIGTERM, 0, "slime: SIGTERM: ending with a commit"),
        (signal.SIGINT, 130, "slime: ctrl-C: ending with a commit"),
    ],
)
def test_a_signal_ends_all(running: Any, number: signal.Signals, status: int, word: str) -> None:
    process, below = running
    process.send_signal(number)
    errors = without_start(process.communicate(timeout=60)[1])
    assert process.returncode == status
    assert errors.startswith(word)
    assert errors.count("\n") == 1
    assert psutil.wait_procs(below, timeout=60)[1] == []


@SLOW
def test_why_tells_the_parent_and_every_rank(running: Any, tmp_path: Path, slime: Slime) -> None:
    """The command that started the ranks has a board of its own, and is asked for its stacks like them."""
    process, below = running
    (waits,) = tmp_path.rglob("waits")
    said = json.loads(slime("why", waits.parent, "--json", "--stacks").stdout)
    assert said["alive"]
    assert {p["role"]: p["state"] for p in said["processes"]} == dict.fromkeys(
        ("parent of the ranks", "rank 0", "rank 1"), "alive"
    )
    of = {p["role"]: p for p in said["processes"]}
    assert of["parent of the ranks"]["pid"] == process.pid
    assert {of["rank 0"]["pid"], of["rank 1"]["pid"]} < {child.pid for child in below}
    assert "start_ranks" in of["parent of the ranks"]["stacks"]
    assert "loop.py" in of["rank 0"]["stacks"]
    assert "launch/roles.py" in of["rank 1"]["stacks"]
    text = slime("why", waits.parent).stdout
    assert all(f"{role}  (pid {of[role]['pid']} on " in text for role in of)


@pytest.mark.slow
def test_ranks_do_not_import_what_lies_in_the_working_directory(two: Callable[..., list[str]], tmp_path: Path) -> None:
    """As the command itself does not."""
    (tmp_path / "http.py").write_text("raise RuntimeError('a stranger')")
    argv = [SLIME, "train", *two(num_rollout=1, eval_interval=None, eval_prompt_data=None)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr


def test_what_is_wrong_is_said_before_any_rank_starts(
    two: Callable[..., list[str]], tiny: TinyRun, tmp_path: Path, slime: Slime
) -> None:
    for changes, said in [
        ({"actor_num_nodes": 2}, "--actor-num-nodes 2 (flag): --launcher inline starts processes on this machine"),
        (
            {"num_rollout": None, "num_epoch": 1, "prompt_data": f"{tiny.root / 'train.jsonl'}@[0:2]"},
            "--num-epoch 1: the 2 prompts do not fill one rollout of --rollout-batch-size 4",
        ),
        ({"load": tmp_path / "nowhere"}, "nowhere: no slime checkpoint there"),
    ]:
        done = slime("train", *two(**changes), check=False)
        assert done.returncode in (1, 2)
        assert said in done.stderr
        assert not (tmp_path / "run" / "ranks").exists()


def test_another_number_than_torchruns_is_refused(two: Callable[..., list[str]], slime: Slime) -> None:
    done = slime("train", *two(), check=False, WORLD_SIZE="3", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert done.returncode == 2
    assert "needs 2 process(es) with these settings, and torchrun started 3" in done.stderr
