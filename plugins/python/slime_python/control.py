"""Run a training on a thread and hand its steps to the caller's thread, one at a time.

The training thread is what makes a notebook work, whose own thread turns an event loop already::

    caller    next() ------------> step -- body of the loop -- next() ----> step ...
    training  generate, train, sync | waits in slime_step_end  | generate, train, sync ...

A caller that leaves the loop, and ctrl-C, end the run after the step, with a commit.
"""

from __future__ import annotations

import gc
import os
import queue
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pluggy

from slime_core import hookimpl
from slime_core.distributions import ALLOW_VARIABLE, SAFE_VARIABLE
from slime_core.errors import ConfigError
from slime_core.launch import drain
from slime_core.plugins.discovery import PLUGIN_DIR_VARIABLE
from slime_core.plugins.manager import OBSERVERS, forget_registry
from slime_core.plugins.registry import Resolved
from slime_core.sample import Group, Sample
from slime_core.waits import waiting

_TICK_S = 0.2
"""Seconds between two signal checks while the caller waits."""
KEPT_VARIABLES = (PLUGIN_DIR_VARIABLE, ALLOW_VARIABLE, SAFE_VARIABLE)
"""Environment variables that a run may set in its process."""
_training = threading.Lock()
"""Lock held during a training: torch's settings and the plugin registry are global to the process."""


@dataclass(frozen=True)
class Step:
    """A rollout that has been trained on."""

    number: int
    """Number of the rollout, counted from 1, as on the console; the rollout's id is one less."""
    metrics: Mapping[str, float]
    """Metrics of the rollout, the training and an evaluation after it, by name."""
    groups: list[Group] = field(repr=False)
    """Groups of samples with their rewards, in the order in which they were trained on."""

    @property
    def samples(self) -> list[Sample]:
        """The samples of all groups."""
        return [sample for group in self.groups for sample in group]

    @property
    def reward(self) -> float:
        """Mean reward of the rollout; NaN if nothing was scored."""
        return float(self.metrics.get("rollout/raw_reward", float("nan")))


class Training:
    """A training on a thread, and the hook plugin through which it reports its steps."""

    def __init__(self, work: Callable[[], Any], *, stepwise: bool) -> None:
        """Start `work`; with `stepwise` the training waits after each step until `next` is called again.

        Raises:
            ConfigError: Another Trainer of this process is training.
        """
        if not _training.acquire(blocking=False):
            raise ConfigError("another Trainer is training in this process; let it end, or leave its loop, first")
        self.result: Any = None
        self._work, self._stepwise = work, stepwise
        self._groups: dict[int, list[Group]] = {}
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._taken = threading.Event()
        self._ending = self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="slime-training", daemon=True)
        self._thread.start()

    def next(self) -> Step | None:
        """Return the next step, or None at the end; the training goes on meanwhile. Raises what ended the run."""
        self._taken.set()
        interrupted = False
        while not self._ended:
            try:
                step = self._steps.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            except KeyboardInterrupt:
                running = drain.current()
                if running is None or not running.ask(signal.SIGINT):
                    raise
                interrupted = True
                continue
            if step is not None:
                return step
            self._ended = True
            self._thread.join(_TICK_S)  # the thread puts the end as its last action
            if self._error is not None:
                raise self._error
            if interrupted:
                raise KeyboardInterrupt
        return None

    def end(self) -> None:
        """End the run after the step it is in, with a commit, and wait for that; nothing to do for one that ended."""
        self._ending, self._stepwise = True, False
        while self.next() is not None:
            pass

    def _run(self) -> None:
        OBSERVERS.append(self)
        try:
            with process_restored():
                self.result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            OBSERVERS.remove(self)
            _training.release()
            self._steps.put(None)

    # -- as an observer of plugins, and as a hook plugin ----------------------------------------------------

    def resolved(self, found: Resolved) -> None:
        """Ignore the component; only `built` is needed."""

    def built(self, manager: pluggy.PluginManager) -> None:
        """Register this object as a hook plugin of the run."""
        if not manager.is_registered(self):
            manager.register(self, name="slime_python:Training")

    @hookimpl
    def slime_rollout_end(self, rollout_id: int, groups: list[Group], metrics: dict[str, float]) -> None:
        """Keep the groups for the step."""
        if self._stepwise:
            self._groups[rollout_id] = groups

    @hookimpl
    def slime_step_end(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Pass the step to the caller; wait until the caller requests the next step."""
        if self._stepwise:
            self._taken.clear()
            self._steps.put(Step(rollout_id + 1, dict(metrics), self._groups.pop(rollout_id, [])))
            with waiting("the loop over the Trainer", deadline=None, then="as long as its body takes"):
                self._taken.wait()
        running = drain.current()
        if self._ending and running is not None:
            running.asked = True


@contextmanager
def process_restored() -> Iterator[None]:
    """Restore the process's state after a run: threads, random numbers, garbage collection, plugins."""
    import numpy
    import torch

    threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    variables = {name: os.environ.get(name) for name in KEPT_VARIABLES}
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        gc.set_threshold(*thresholds)
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        forget_registry()
