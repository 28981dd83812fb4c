"""A real `slime serve`, killed in the middle of a run of `--rollout-engine http`, which comes back, or does not."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from slime_runs.files import read_lines

from slime_core.checkpoint.store import find
from tests.conftest import SLIME, Slime, TinyRun

GENERATE = """
import os, signal
asked = 0
async def generate(args, sample, sampling_params, context):
    global asked
    asked += 1
    if asked == {at}:
        pid = int(open({pid!r}).read())
        os.kill(pid, signal.SIGKILL)
    output = await context.engine.generate(sample.tokens, sampling_params)
    sample.append_response_tokens(args, output.token_ids, output.log_probs, meta_info=output.meta_info)
    return sample
"""
"""Kills the server right before a request, while those before it are under way."""


class Server:
    """`slime serve` at one port; what ends it has it started again `comebacks` times."""

    def __init__(self, model: Path, port: int, pid: Path, comebacks: int) -> None:
        self.starts = 0
        self._argv = [SLIME, "serve", "--hf-checkpoint", model, "--port", port, "--num-threads", 1]
        self._pid, self._comebacks, self._closed = pid, comebacks, False
        self._start()
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _start(self) -> None:
        self._process = subprocess.Popen(list(map(str, self._argv)), stdout=subprocess.PIPE, text=True)
        self.starts += 1
        self._pid.write_text(str(self._process.pid))
        assert self._process.stdout is not None
        assert "serving" in self._process.stdout.readline()

    def _keep(self) -> None:
        while self._process.wait() is not None and not self._closed and self.starts <= self._comebacks:
            self._start()

    def close(self) -> None:
        self._closed = True
        self._process.kill()
        self._thread.join()
        self._process.kill()
        self._process.wait()


@contextmanager
def serving(tiny: TinyRun, port: int, pid: Path, comebacks: int) -> Iterator[Server]:
    server = Server(tiny.root / "model", port, pid, comebacks)
    try:
        yield server
    finally:
        server.close()


def weights_of(run_dir: Path) -> bytes:
    commit = find(run_dir)
    assert commit is not None
    return (commit / "model.safetensors").read_bytes()


def flags(folder: Path, port: int, *, at: int) -> dict[str, Any]:
    (folder / "gen.py").write_text(GENERATE.format(at=at, pid=str(folder / "pid")))
    return {
        "num_rollout": 3, "rollout_engine": "http", "rollout_external_engine_addrs": f"127.0.0.1:{port}",
        "custom_generate_function_path": folder / "gen.py", "eval_interval": None, "eval_prompt_data": None,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("at", [20, 32])
def test_an_engine_that_is_restarted_is_waited_for_and_brought_to_the_weights(
    tiny: TinyRun, slime: Slime, tmp_path: Path, free_port: int, at: int
) -> None:
    """Of 16 requests a rollout: in the middle of the second, and with its last."""
    with serving(tiny, free_port, tmp_path / "pid", comebacks=1) as server:
        slime("train", *tiny.argv(tmp_path / "killed", **flags(tmp_path, free_port, at=at)))
        assert server.starts == 2
        assert [line["event"] for line in read_lines(tmp_path / "killed" / "events.jsonl")] == [
            "quarantined",
            "readmitted",
        ]
        slime("train", *tiny.argv(tmp_path / "quiet", **flags(tmp_path, free_port, at=-1)))
    assert weights_of(tmp_path / "killed") == weights_of(tmp_path / "quiet")


@pytest.mark.slow
def test_an_engine_that_stays_away_is_named_with_how_to_go_on(
    tiny: TinyRun, slime: Slime, tmp_path: Path, free_port: int
) -> None:
    with serving(tiny, free_port, tmp_path / "pid", comebacks=0):
        done = slime("train", *tiny.argv(tmp_path / "run", **flags(tmp_path, free_port, at=20)), check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0
    assert "abort_request" not in last
    assert f"http://127.0.0.1:{free_port} is gone" in last
    assert "the same command with --load" in last
