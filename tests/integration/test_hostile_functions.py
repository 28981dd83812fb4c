"""Functions that swallow their cancellation, interrupt, leave the directory or stop the loop: each costs its sample.

What ends the run all the same names the function.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SLIME, TinyRun
from tests.run_files import metrics
from tests.zygote import Zygote

FLAGS: dict[str, Any] = {
    "num_rollout": 2, "rollout_batch_size": 2, "n_samples_per_prompt": 4, "rollout_max_response_len": 4,
    "eval_interval": None, "eval_prompt_data": None, "num_steps_per_rollout": 1, "max_consecutive_failures": 100,
    "no_preflight": True, "rm_workers": None, "no_trace": True,
}  # fmt: skip
HOSTILE = """
import asyncio, os, signal, sys, threading, time
from slime_generators.single_turn import generate as single_turn

async def deaf():
    while True:                             # without an event loop it would never return
        try:
            await asyncio.sleep(600)
        except BaseException:
            pass

async def odd(kind):
    if kind == "interrupt": raise KeyboardInterrupt
    if kind == "exit": raise SystemExit(0)
    if kind == "deaf": await deaf()
    if kind == "swallow":                   # ends in time, but late
        try: await asyncio.sleep(600)
        except BaseException: return
    if kind == "background": background.append(asyncio.create_task(deaf()))
    if kind == "thread": await asyncio.to_thread(time.sleep, 600)
    if kind == "chdir": os.chdir("/")
    if kind == "stop": asyncio.get_running_loop().stop(); await asyncio.sleep(0)
    if kind == "close": asyncio.get_running_loop().close()
    if kind == "_exit": os._exit(0)

background = []
KINDS = os.environ["KINDS"].split()

def kind_of(sample):
    return KINDS[sample.index] if sample.index < len(KINDS) else ""

async def reward(args, sample, **kwargs):
    if not kwargs.get("evaluation"): await odd(kind_of(sample))
    sample.metadata["rewarded"] = True
    return float(sample.index % 2)

async def generate(args, sample, params, *, context):
    await odd(kind_of(sample))
    return await single_turn(args, sample, params, context=context)

def plain(args, sample, **kwargs):
    return float(sample.index % 2)

def keep(args, samples, **kwargs):
    if KINDS[0] == "interrupt": raise KeyboardInterrupt
    if KINDS[0] == "exit": sys.exit(0)
    if KINDS[0] == "_exit": os._exit(0)
    return True
"""


@pytest.fixture
def run(zygote: Zygote, tiny: TinyRun, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run(kinds, **changes)`: a run in `tmp_path`, with a relative `--save`."""
    (tmp_path / "hostile.py").write_text(HOSTILE)

    def one(kinds: str, **changes: Any) -> subprocess.CompletedProcess[str]:
        argv = ["train", *tiny.argv(Path("run"), **{**FLAGS, **changes})]
        return zygote.run(argv, _environment(kinds), 120, cwd=tmp_path)

    return one


def _environment(kinds: str) -> dict[str, str]:
    return {**os.environ, "KINDS": kinds, "OMP_NUM_THREADS": "1"}


ODD = "interrupt exit deaf swallow chdir close"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["generate", "reward"])
def test_one_sample_is_lost_and_the_run_ends_as_it_should(run: Any, tmp_path: Path, where: str) -> None:
    own = {"custom_rm_path": "hostile.py:plain" if where == "generate" else "hostile.py:reward"}
    if where == "generate":
        own["custom_generate_function_path"] = "hostile.py:generate"
    began = time.monotonic()
    done = run(ODD, rm_timeout=1, rollout_timeout=1 if where == "generate" else None, **own)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 60
    flag = "--rollout-timeout 1" if where == "generate" else "--rm-timeout 1"
    for said in ("raised KeyboardInterrupt", "raised SystemExit", f"{flag}.0 s"):
        assert said in done.stderr
    assert {f"sample {number} failed in {where}" for number in (0, 1)} <= {
        found.replace("generator", "generate") for found in re.findall(r"sample \d+ failed in \w+", done.stderr)
    }
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    assert (tmp_path / "run" / "summary.json").is_file()
    assert (tmp_path / "run" / "checkpoints" / "rollout_0000001").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["background", "thread"])
def test_what_a_function_leaves_behind_does_not_hold_the_end(run: Any, kind: str) -> None:
    done = run(kind, rm_timeout=1, custom_rm_path="hostile.py:reward")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_sigterm_is_heard_while_functions_are_deaf(tiny: TinyRun, tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    argv = tiny.argv(tmp_path / "run", **FLAGS, rm_timeout=600, custom_rm_path=tmp_path / "hostile.py:reward")
    started = subprocess.Popen([SLIME, "train", *argv], env=_environment("deaf"), stderr=subprocess.PIPE, text=True)
    board = tmp_path / "run" / "waits"
    until = time.monotonic() + 60
    while not any("of sample 0" in path.read_text() for path in board.glob("*.json")):
        assert time.monotonic() < until
        time.sleep(0.1)
    began = time.monotonic()
    started.send_signal(signal.SIGTERM)
    _, err = started.communicate(timeout=90)
    assert time.monotonic() - began < 40, err
    assert started.returncode in (0, 143), err
    assert "Traceback" not in err


GENERATE = {"custom_generate_function_path": "hostile.py:generate"}
FILTER = {"dynamic_sampling_filter_path": "hostile.py:keep"}


@pytest.mark.parametrize(
    ("kinds", "changes", "said"),
    [
        ("_exit", GENERATE, "odd ({folder}/hostile.py:24) called os._exit(0)"),
        pytest.param("interrupt", FILTER, "raised KeyboardInterrupt (at {folder}/hostile.py:", marks=pytest.mark.slow),
        pytest.param("exit", FILTER, "raised SystemExit: 0 (at {folder}/hostile.py:", marks=pytest.mark.slow),
        pytest.param("_exit", FILTER, "called os._exit(0)", marks=pytest.mark.slow),
        pytest.param("stop", GENERATE, "stopped the run's event loop", marks=pytest.mark.slow),
    ],
)
def test_what_ends_the_run_is_named_and_is_no_success(
    run: Any, tmp_path: Path, kinds: str, changes: dict[str, Any], said: str
) -> None:
    done = run(kinds, custom_rm_path="hostile.py:plain", **changes)
    assert done.returncode not in (0, 130), done.stderr
    assert said.format(folder=tmp_path) in done.stderr
    assert "hostile.py" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "summary.json").exists()
