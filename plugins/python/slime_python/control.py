"""Run a training beside the caller, and pass calls and steps between the two.

A training runs on a thread of this process, whose own thread may turn an event loop already, as a notebook's does. Its
loop answers over a channel (`loops.py`)::

    caller    next() ------------> step -- body of the loop -- next() ----> step ...
    training  generate, train, sync | waits                   | generate, train, sync ...

While one training holds this process (torch's settings and the plugin registry are global to it), another runs in a
process of its own, as does one whose trainer needs several processes: the thread starts `slime train` under a guard,
and the loop's end of the channel is there. A caller that leaves the loop, ctrl-C, and the end of Python end the run
with a commit.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slime_core.checkpoint.run_dir import run_dir_of
from slime_core.config import Settings
from slime_core.distributions import ALLOW_VARIABLE, SAFE_VARIABLE
from slime_core.errors import ConfigError, SlimeError, TrainError
from slime_core.plugins.discovery import PLUGIN_DIR_VARIABLE
from slime_core.plugins.manager import OBSERVERS, forget_registry
from slime_core.workers.process import Guarded, python
from slime_python.channel import VARIABLE, Channel, Listening, ends
from slime_python.loops import MODES
from slime_python.steps import Step
from slime_python.words import in_python

logger = logging.getLogger(__name__)

_TICK_S = 0.2
"""Seconds between two signal checks while the caller waits."""
_EXIT_S = 60.0
"""Seconds that a training gets to end when Python exits."""
_STOP_S = 30.0
KEPT_VARIABLES = (PLUGIN_DIR_VARIABLE, ALLOW_VARIABLE, SAFE_VARIABLE)
"""Environment variables that a run may set in its process."""
OUTPUT = "output.log"
"""File in the run directory: output of a run in a process of its own."""
_here = threading.Lock()
"""Lock held by the training in this process."""
_PLUGIN = '[project]\nname = "slime-python-caller"\n[project.entry-points."slime.plugins"]\n'
_PLUGIN += 'caller = "slime_caller:plugin"\n'


class Training:
    """A training in progress.

    Args:
        settings: Settings of the run.
        mode: "train", "steps" or "calls" (`loops.MODES`).
        alone: True to run in a process of its own, whether another training runs in this one or not.

    Raises:
        ConfigError: The training must run in this process, and another one does.
    """

    def __init__(self, settings: Settings, mode: str, *, alone: bool = False) -> None:
        self.mode = mode
        self.on_tick: Callable[[], None] = lambda: None
        """Called several times a second while the caller waits."""
        self._settings = settings
        self._error: BaseException | None = None
        self._interrupted = False
        self._ended = False
        self._waiting_step = False
        """True while the loop waits for the caller after a step."""
        self._process: Guarded | None = None
        work = self._work_elsewhere if alone or not _here.acquire(blocking=False) else self._work_here
        if work == self._work_elsewhere:
            _refuse_objects(settings)
            self._channel: Channel = Listening()
            self._process = Guarded(
                "the run", stop_s=_STOP_S, log=Path(run_dir_of(settings.args)) / OUTPUT, error=TrainError
            )
        else:
            self._channel, theirs = ends()
            self._loop = MODES[mode](theirs)
        self._thread = threading.Thread(target=self._run, args=(work,), name="slime-training", daemon=True)
        _active.add(self)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True until the run has ended."""
        return not self._ended

    def next(self) -> Step | None:
        """Return the next step, or None at the end; the training goes on meanwhile. Raises what ended the run."""
        if self._waiting_step:
            self._channel.send(("next", None))
        found: Step | None = self._wait()
        self._waiting_step = found is not None
        return found

    def call(self, verb: str, value: Any = None) -> Any:
        """Let the loop do a call, and return its answer; None if the run has ended. Raises what ended the run."""
        self._channel.send((verb, value))
        return self._wait()

    def end(self) -> None:
        """End the run with a commit after the step that it is in, and wait for that. Raises what ended the run."""
        if self._ended:
            return
        self._channel.send(("end", None))
        if self.mode != "calls" and not self._waiting_step:
            self._ask()
        self._waiting_step = False
        while self._wait() is not None:
            self._channel.send(("end", None))

    def _wait(self) -> Any:
        while not self._ended:
            try:
                if self._channel.poll(_TICK_S):
                    return self._channel.recv()
                self._ended = not self._thread.is_alive() and not self._channel.poll(0)
                self.on_tick()
            except (EOFError, OSError):  # the other process has ended, or will have in a moment
                self._thread.join(_TICK_S)
                self._ended = not self._thread.is_alive()
            except KeyboardInterrupt:
                if self._interrupted:
                    raise
                self._ask()
                print("slime: ctrl-C: ending with a commit of what is trained; again to stop waiting", file=sys.stderr)
                self._interrupted = True
        _active.discard(self)
        error, self._error = self._error, None
        if self._interrupted and (error is None or self._process is not None):
            self._interrupted = False
            raise KeyboardInterrupt
        if error is not None:
            raise in_python(error)
        return None

    def _ask(self) -> None:
        """Interrupt the rollout in progress; the run ends with a commit."""
        if self._process is not None:
            self._process.signal(signal.SIGINT)
        else:
            self._loop.interrupt()

    # -- on the thread ----------------------------------------------------------------------------------------

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def _work_here(self) -> None:
        from slime_core import launch

        OBSERVERS.append(self._loop)
        try:
            with process_restored() as before:
                _of_caller.update(before)
                launch.run(self._settings)
        finally:
            _of_caller.clear()
            OBSERVERS.remove(self._loop)
            self._loop.forget()
            _here.release()

    def _work_elsewhere(self) -> None:
        assert isinstance(self._channel, Listening)
        assert self._process is not None
        folder = self._channel.folder / "plugin"
        folder.mkdir()
        (folder / "pyproject.toml").write_text(_PLUGIN, encoding="utf-8")
        (folder / "slime_caller.py").write_text("from slime_python.elsewhere import plugin\n", encoding="utf-8")
        known = {name: value for name, value in {**os.environ, **_of_caller}.items() if value is not None}
        places = [known.get(PLUGIN_DIR_VARIABLE), str(folder)]
        environment = {
            **known,
            PLUGIN_DIR_VARIABLE: os.pathsep.join(filter(None, places)),
            VARIABLE: f"{self.mode}:{self._channel.address}",
        }
        try:
            self._process.start([*python(), "-m", "slime_core", "train", *self._settings.argv], environment)
            if self._process.wait():
                raise TrainError(_last_words(self._process))
        finally:
            self._process.stop()
            self._channel.close()


def _refuse_objects(settings: Settings) -> None:
    """Raise ConfigError if the run has functions that only this process has."""
    if any("slime_python.here:" in word for word in settings.argv):
        raise ConfigError(
            "another Trainer is training in this process, and this one has a function that cannot be pickled, so it"
            " cannot run in another; let the first one end, or leave its loop, first"
        )


def _last_words(process: Guarded) -> str:
    assert process.log is not None
    lines = process.log.read_bytes()[process.begin :].decode(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("slime: error: ")]
    last = errors[-1].removeprefix("slime: error: ") if errors else "\n".join(lines[-1:])
    return f"{last or process.ending()}; its output is in {process.log}"


_active: weakref.WeakSet[Training] = weakref.WeakSet()


def _end_all() -> None:
    """End every training when Python exits, with a commit, so that no process and no file of theirs is left."""
    trainings = list(_active)
    for training in trainings:
        training._channel.send(("end", None))
        training._ask()
    until = time.monotonic() + _EXIT_S
    for training in trainings:
        training._thread.join(max(0.0, until - time.monotonic()))
        training._ended = True  # a loop that was left over calls `end` when Python deletes it
        if training._process is not None:
            with suppress(SlimeError):
                training._process.kill()


# Before the executors of `concurrent.futures` end, which a commit needs; `atexit` comes after them.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]


_of_caller: dict[str, str | None] = {}
"""The kept variables as they were before the training that runs in this process; empty while none does."""


@contextmanager
def plugins_restored() -> Iterator[dict[str, str | None]]:
    """Restore the variables that say which plugins there are; yields them as they were."""
    variables = {name: os.environ.get(name) for name in KEPT_VARIABLES}
    try:
        yield variables
    finally:
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        forget_registry()


@contextmanager
def process_restored() -> Iterator[dict[str, str | None]]:
    """Restore the process's state after a run: threads, random numbers, garbage collection, `plugins_restored`."""
    import numpy
    import torch

    threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        with plugins_restored() as variables:
            yield variables
    finally:
        torch.set_num_threads(threads)
        gc.set_threshold(*thresholds)
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
