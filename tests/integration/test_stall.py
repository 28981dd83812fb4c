"""A reward, a trainer, an engine that hangs, through the command: the run ends by itself, and says where it hung."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SLIME, Slime, TinyRun

TRAINER_HANGS = """
import threading
from slime_core.waits import watchdog

watchdog.GRACE = 0.5  # seconds that the wait's own mechanism gets, 15 outside of tests

def postprocess(args, rollout_id, data):
    if rollout_id == 1:
        threading.Event().wait()
"""
ENGINE_HANGS = """
import asyncio
from slime_embedded.engine.engine import EmbeddedEngine
from slime_core.waits import watchdog

watchdog.GRACE = 0.5

class Engine(EmbeddedEngine):
    async def update_weights_from_tensor(self, weights, version):
        if version == 3:
            await asyncio.Event().wait()
        return await super().update_weights_from_tensor(weights, version)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "flags", "wait", "place"),
    [
        (TRAINER_HANGS, {"train_timeout": 6, "rollout_data_postprocess_path": "hang.py:postprocess"},
         "optimizer steps of rollout 2: not done within 6 s", "in postprocess"),
        (ENGINE_HANGS, {"weight_push_timeout": 6, "rollout_engine": "hang.py:Engine"},
         "weights to the engines: not done within 6 s", "slime_core/weights/sync.py"),
    ],
    ids=["trainer", "engine"],
)  # fmt: skip
@pytest.mark.parametrize("mode", [{}, pytest.param({"async": True}, marks=pytest.mark.slow)], ids=["sync", "async"])
def test_a_trainer_or_engine_that_hangs_ends_the_run(
    tiny: TinyRun, slime: Slime, tmp_path: Path, program: str, flags: dict[str, Any], wait: str, place: str,
    mode: dict[str, Any],
) -> None:  # fmt: skip
    """Their thread does not come back, so the process ends; the commit before it is whole and can be gone on with."""
    (tmp_path / "hang.py").write_text(program)
    flags = {k: str(tmp_path / v) if isinstance(v, str) else v for k, v in flags.items()}
    save, no_eval = tmp_path / "run", {"eval_interval": None, "eval_prompt_data": None}
    done = slime("train", *tiny.argv(save, **flags, **mode, **no_eval, num_rollout=3), check=False, timeout=100)
    assert done.returncode == 75, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("slime: error")]
    assert wait in said
    assert said.endswith("this process ends with status 75")
    (report,) = (save / "stalls").iterdir()
    assert str(report) in said
    assert place in report.read_text().partition("stacks of this process")[2]
    commits = sorted(path.name for path in (save / "checkpoints").glob("rollout_*"))
    assert commits == ["rollout_0000000"]
    assert "the ledger holds" in slime("ledger", "verify", save).stdout
    rest = slime("train", *tiny.argv(save, **mode, **no_eval, num_rollout=2, load=save))
    assert "1 of 2 rollouts done, continuing with rollout 2" in rest.stdout


KEEPS_THE_LOOP = """
import asyncio, os, time
from slime_core.waits import watchdog

watchdog.GRACE = 0.5

async def generate(args, sample, sampling_params):
    keep()

async def reward(args, sample, **kwargs):
    await asyncio.sleep(0)
    keep()

def keep():
    print("keeps the loop", flush=True)
    time.sleep(10000)
"""


@pytest.fixture
def keeps_the_loop(tiny: TinyRun, tmp_path: Path) -> Callable[..., list[str]]:
    (tmp_path / "mine.py").write_text(KEEPS_THE_LOOP)

    def argv(flag: str, function: str, **more: Any) -> list[str]:
        own = {flag: f"{tmp_path / 'mine.py'}:{function}", "skip_eval_before_train": True, **more}
        return tiny.argv(tmp_path / "run", **own)

    return argv


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "function", "mode"),
    [
        ("custom_generate_function_path", "generate", {}),
        ("custom_rm_path", "reward", {}),
        ("custom_rm_path", "reward", {"async": True}),
    ],
)
def test_a_call_that_keeps_the_event_loop_ends_the_run_and_is_named(
    keeps_the_loop: Callable[..., list[str]], slime: Slime, flag: str, function: str, mode: dict[str, Any]
) -> None:
    """No deadline of the loop can fire; the one on which the run depends is kept elsewhere, too."""
    limits = {"rollout_timeout": 1, "rollout_stall_timeout": 2}
    done = slime("train", *keeps_the_loop(flag, function, **limits, **mode), check=False, timeout=100)
    assert done.returncode == 75, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("slime: error")]
    assert "not done within 2 s" in said
    assert re.search(rf"mine\.py(:\w+)?', {function} \(now at .*mine\.py:\d+\) keeps the event loop", said), said


@pytest.mark.slow
def test_sigterm_ends_a_run_whose_event_loop_is_kept(keeps_the_loop: Callable[..., list[str]]) -> None:
    argv = [SLIME, "train", *keeps_the_loop("custom_rm_path", "reward")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "keeps the loop\n" in iter(process.stdout.readline, "")
        process.terminate()
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 143
    assert "asked to end, which the event loop cannot: " in said
    assert "keep (now at" not in said
    assert ", reward (now at " in said
