"""`simulate(seed)`: one run with its faults, from its beginning to its end through all its lives; and the search.

Faults strike once each, so a run that cannot be ended well in as many lives as it has faults, and a few more, is
broken.
"""

from __future__ import annotations

import hashlib
import logging
import random
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_core.errors import SlimeError
from tests.simulation.check import History
from tests.simulation.faults import Fault, Faults, drawn
from tests.simulation.loop import SimulationError, VirtualClock
from tests.simulation.settings import SimulationSettings
from tests.simulation.world import World

_FAST = Path("/dev/shm")
_MORE_LIVES = 3
PLACES = ("engine", "reward", "push", "train", "save", "eval", "disk", "driver", "preempt")


@dataclass
class Report:
    """What came of one simulated run."""

    seed: int
    settings: SimulationSettings
    faults: tuple[Fault, ...]
    violations: list[str]
    """Promises that were broken; none in a good run."""
    lives: int = 0
    struck: tuple[Fault, ...] = ()
    """Faults whose time came."""
    events: int = 0
    turns: int = 0
    """Callbacks of the event loops."""
    virtual_seconds: float = 0.0
    seconds: float = 0.0
    endings: list[str] = field(default_factory=list)
    """How each life ended."""
    batches: dict[int, str] = field(default_factory=dict)
    """Rollout -> digest of the batch that the finished run was trained on."""
    trace: list[str] = field(default_factory=list, repr=False)

    @property
    def ok(self) -> bool:
        """No promise was broken."""
        return not self.violations

    @property
    def digest(self) -> str:
        """Of the trace: equal for runs in which the same things happened in the same order."""
        return hashlib.blake2b("\n".join(self.trace).encode(), digest_size=8).hexdigest()

    @property
    def command(self) -> str:
        """Replays the run."""
        return f"python -m tests.simulation --seed {self.seed} --mode {self.settings.mode}"

    def __str__(self) -> str:
        """Everything a reader needs."""
        faults = ", ".join(map(str, self.faults)) or "none"
        lines = [
            f"seed {self.seed}: {'ok' if self.ok else 'FAILED'} after {self.lives} lives ({', '.join(self.endings)}),"
            f" {self.events} events, {self.virtual_seconds:.1f} virtual seconds, trace {self.digest}",
            f"  settings: {self.settings}",
            f"  faults: {faults}",
            *(f"  broken: {violation}" for violation in self.violations),
        ]
        if not self.ok:
            lines.append(f"  replay: {self.command}")
        return "\n".join(lines)


def simulate(
    seed: int,
    settings: SimulationSettings | None = None,
    faults: Iterable[Fault] | None = None,
    *,
    mode: str = "sync",
    world: type[World] = World,
) -> Report:
    """Run one seed.

    Args:
        seed: Draws everything that is not given.
        settings: Drawn for `mode` when left out.
        faults: Drawn when left out.
        mode: "sync", "one-step" or "full".
        world: What a life is made by; tests plant mistakes in subclasses.
    """
    rng = random.Random(f"{seed} {mode}")
    chosen = SimulationSettings.drawn(rng, mode)
    schedule = drawn(rng, PLACES)
    settings = settings or chosen
    schedule = schedule if faults is None else list(faults)
    started = time.perf_counter()
    run = Faults(schedule)
    history, clock = History(settings), VirtualClock()
    report = Report(seed, settings, tuple(schedule), history.violations, batches=history.batches, trace=history.trace)
    with _directory() as root, clock.installed(), _quiet():
        for life in range(len(schedule) + _MORE_LIVES):
            one = world(rng.randrange(1 << 30), settings, run, history, clock, root)
            ending = _live(one, history, struck_before=len(run.struck))
            report.endings.append(ending)
            report.turns += one.loop.turns
            history.note(f"{clock.now:.6f} life {life + 1} {ending}")
            if ending == "done" or history.violations:
                break
        else:
            history.violated(f"not done after {history.lives} lives: {', '.join(report.endings)}")
    report.lives, report.struck, report.events = history.lives, tuple(run.struck), run.events
    report.virtual_seconds, report.seconds = clock.now, time.perf_counter() - started
    return report


def _live(world: World, history: History, struck_before: int) -> str:
    """How one life ended; an error that no fault explains is a broken promise."""
    try:
        return world.run()
    except SlimeError as error:
        if len(world.faults.struck) == struck_before:
            history.violated(f"ended without a fault: {type(error).__name__}: {error}")
        history.note(f"error {type(error).__name__}")
        return type(error).__name__
    except SimulationError as error:
        history.violated(f"{type(error).__name__}: {error}")
    except Exception as error:
        history.violated(f"{type(error).__name__}: {error}\n{_traceback(error)}")
    return "broken"


def explore(seeds: Iterable[int], *, mode: str = "sync", world: type[World] = World) -> Iterator[Report]:
    """Run many seeds; the reports of all, in order."""
    for seed in seeds:
        yield simulate(seed, mode=mode, world=world)


def shrink(report: Report, *, world: type[World] = World) -> Report:
    """The report of the same seed with as few faults as still break a promise."""
    best = report
    smaller = True
    while smaller:
        smaller = False
        for fault in best.faults:
            left: Sequence[Fault] = [f for f in best.faults if f != fault]
            tried = simulate(best.seed, best.settings, left, mode=best.settings.mode, world=world)
            if not tried.ok:
                best, smaller = tried, True
                break
    return best


@contextmanager
def _directory() -> Iterator[Path]:
    """An empty directory, in memory where there is one."""
    root = Path(tempfile.mkdtemp(prefix="slime-simulated-", dir=_FAST if _FAST.is_dir() else None))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """What the code under test says about every fault is not shown."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _traceback(error: BaseException) -> str:
    import traceback

    found: list[Any] = traceback.format_exception(error)
    return "".join(found[-8:])
