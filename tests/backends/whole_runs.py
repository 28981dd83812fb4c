"""Whole runs as a user types them, for the tests of several backends: the demo, and every process below a command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import SLIME

ROOT = Path(__file__).parents[2]
ROLLOUTS = 6
"""Of the demo: most of what there is to learn is learned in the first four."""
GONE_S = 60.0
"""For what a run has started to be gone after it, on a machine with much else to do."""
_HOLD = """
import sys
import time
from pathlib import Path

sys.path.insert(0, {root!r})
from tests.run_files import metrics


def log(rollout_id, args, samples, extra, seconds):
    end = time.monotonic() + 120
    while rollout_id == {rollout} and not Path({go!r}).exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    return False
"""
_SCRIPT = """
import json, sys
from slime_testing_contracts.tiny import digits, tiny_model
from slime_core import Trainer

ROWS = [{{"input": f"{{a}}+{{b}}=?", "label": str(a + b)}} for a in range(10, 18) for b in range(10, 14)]
weight = 2.0
with Trainer(
    tiny_model(), data=ROWS, reward=lambda args, sample: weight * digits(args, sample), num_rollout=2,
    rollout_batch_size=4, n_samples_per_prompt=4, rollout_max_response_len=8, lr=3e-3,
    apply_chat_template=True, num_threads=1, preflight=False, **{settings!r},
) as trainer:
    steps = [(step.reward, step.metrics["train/grad_norm"]) for step in trainer]
    print(json.dumps([steps, trainer.generate(["12+30=?"], temperature=0.0)]))
"""


class Run:
    """A `slime` command, and every process that it ever had below it."""

    def __init__(self, argv: list[str], cwd: Path, log: Path) -> None:
        self.log = log
        self.processes: dict[int, psutil.Process] = {}
        self.shared: set[Path] = set()
        """Files in shared memory that they had, whenever they were noted."""
        with log.open("w") as errors:
            self._popen = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=cwd, process_group=0
            )
        assert self._popen.stdout is not None
        self._lines = iter(self._popen.stdout.readline, "")
        self.printed: list[str] = []

    @property
    def pid(self) -> int:
        """Of the command, and of its process group."""
        return self._popen.pid

    @property
    def ended(self) -> bool:
        """Whether the command has come to its end."""
        return self._popen.poll() is not None

    def until(self, start: str) -> None:
        """Read its output up to a line that begins so; what runs below it then is noted."""
        for line in self._lines:
            self.printed.append(line)
            if line.startswith(start):
                self.note()
                return
        raise AssertionError(f"no line {start!r}: {self.said()}")

    def note(self) -> list[psutil.Process]:
        found = psutil.Process(self._popen.pid).children(recursive=True)
        self.processes |= {process.pid: process for process in found}
        self.shared |= {path for process in found for path in _shared_memory(process.pid)}
        return found

    def servers(self) -> list[psutil.Process]:
        """The process of each SGLang server that answers HTTP."""
        lines = [(process, command_line(process)) for process in self.note()]
        return [process for process, line in lines if "sglang.launch_server" in line and "guard.py" not in line]

    def finish(self) -> str:
        """To the end; it must go well. What it printed."""
        self.printed += self._lines
        assert self._popen.wait(timeout=600) == 0, self.said()
        return "".join(self.printed)

    def fail(self, seconds: float) -> int:
        """To its end, which must come within so many seconds; its exit status."""
        status = self._popen.wait(timeout=seconds)
        self.printed += self._lines
        return status

    def kill(self) -> None:
        """SIGKILL, to this process alone."""
        self.note()
        self._popen.kill()
        assert self._popen.wait(timeout=60) == -signal.SIGKILL

    def said(self) -> str:
        return "".join(self.printed) + self.log.read_text()

    def left(self, seconds: float = GONE_S) -> list[psutil.Process]:
        """What still runs after so many seconds; as soon as nothing does, that."""
        return still_running(self.processes.values(), seconds)

    def close(self) -> None:
        if self._popen.poll() is None:
            self._popen.terminate()
            self._popen.wait(timeout=60)
        assert self._popen.stdout is not None
        self._popen.stdout.close()


def command_line(process: psutil.Process) -> str:
    """Its words; "" of one that has ended since it was found."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def still_running(processes: Iterable[psutil.Process], seconds: float = GONE_S) -> list[psutil.Process]:
    """Those that have not ended within so many seconds. What nobody has waited for is no longer running."""
    left, until = [p for p in processes if _runs(p)], time.monotonic() + seconds
    while left and time.monotonic() < until:
        time.sleep(0.05)
        left = [p for p in left if _runs(p)]
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


def _shared_memory(pid: int) -> Iterator[Path]:
    found: set[str] = set()
    with suppress(OSError):  # it has ended, or ends while it is read
        found |= {line.split(None, 5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed since; the others count
                found.add(os.readlink(link))
    yield from (Path(path) for path in found if "/dev/shm/" in path)


@contextmanager
def running(argv: list[Any], cwd: Path, log: Path) -> Iterator[Run]:
    run = Run([str(word) for word in argv], cwd, log)
    try:
        yield run
    finally:
        run.close()


def hold(directory: Path, rollout: int) -> Path:
    """A `--custom-rollout-log-function-path`: this rollout, counted from 0, reaches the trainer after `release`.

    What a test looks at while a run goes on, the run has to stay for: on a busy machine it ends before.
    """
    file = directory / "hold.py"
    file.write_text(_HOLD.format(root=str(ROOT), rollout=rollout, go=str(directory / "go")))
    return file


def release(directory: Path) -> None:
    (directory / "go").touch()


def samples(template: Path, rollout: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(str(template).format(rollout_id=rollout)).read_text().splitlines()]


@dataclass(frozen=True)
class Learned:
    """A finished run of the demo."""

    directory: Path
    samples: Path
    metrics: list[dict[str, Any]]

    def scores(self) -> list[float]:
        return [line["eval/addition"] for line in self.metrics if "eval/addition" in line]


def demo(cwd: Path, name: str, *flags: str) -> list[str]:
    saved = ["--save-debug-rollout-data", f"{name}-samples/{{rollout_id}}.jsonl"]
    sizes = ["--num-rollout", str(ROLLOUTS), "--eval-interval", str(ROLLOUTS), "--save-interval", str(ROLLOUTS)]
    run_file = cwd / "demo.yaml"
    if not run_file.exists():
        subprocess.run([SLIME, "init", "demo", run_file], check=True, capture_output=True)
    return [SLIME, "train", "--config", str(run_file), "--save", name, *saved, *sizes, *flags]


def from_python(cwd: Path, **settings: Any) -> tuple[list[tuple[float, float]], list[str]]:
    """Run `slime_core.Trainer` in a script; return reward and gradient norm of its steps, and an answer after them."""
    cwd.mkdir()
    (cwd / "script.py").write_text(_SCRIPT.format(settings=settings))
    done = subprocess.run(
        [sys.executable, "script.py"],
        capture_output=True, text=True, timeout=600, cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    steps, answers = json.loads(done.stdout.splitlines()[-1])
    return [(reward, norm) for reward, norm in steps], answers
