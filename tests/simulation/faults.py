"""What goes wrong in a simulated run, and when: a list drawn from the seed, small enough to read and to shrink.

Every simulated component asks `Faults.at(place)` once per event; events are counted over the whole run, all its lives
included, so a fault strikes once and a run goes on behind it. A fault in the list need not strike; the event it waits
for may never come. `Faults.struck` holds those that did.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KINDS: dict[str, tuple[str, ...]] = {
    "engine": ("crash", "hang", "slow", "duplicate", "late", "abort"),
    "reward": ("crash", "hang", "slow", "duplicate", "late"),
    "push": ("crash", "hang", "slow", "duplicate", "late"),
    "train": ("crash", "hang", "slow"),
    "save": ("crash", "slow", "duplicate"),
    "eval": ("crash", "slow", "duplicate"),
    "disk": ("full", "denied", "kill"),
    "driver": ("kill",),
    "preempt": ("term",),
}
"""Place -> what may happen there. "driver" and "preempt" count the events of all other places together.

engine   crash: the request fails half-way; hang: neither an answer nor an ear for aborts; slow: 20 times as long;
         duplicate: generated twice, the second counts; late: aborts are heard a minute late; abort: nobody asked for it
reward   crash: raises; hang: no answer; slow; duplicate: called twice; late: answers after it was cancelled
push     crash: refused; hang: refused after the deadline; slow; duplicate: twice; late: served, but said to be refused
train    crash: raises; hang: raises after the deadline; slow
save     crash: raises before anything is written; slow; duplicate: twice
eval     crash: raises; slow; duplicate: twice
disk     full, denied: the operation on the file system fails; kill: the process ends just before it
driver   kill: the process ends
preempt  term: the process is asked to end
"""

_EVENTS = {
    "engine": 30, "reward": 30, "push": 4, "train": 4, "save": 3, "eval": 2, "disk": 50, "driver": 150, "preempt": 120,
}  # fmt: skip
"""About how many events a run has, for drawing when."""


@dataclass(frozen=True, order=True)
class Fault:
    """One thing that goes wrong: at the event number `at` (from 0) of `place`."""

    place: str
    at: int
    kind: str

    def __str__(self) -> str:
        return f"{self.place}[{self.at}]={self.kind}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Inverse of `str`. Raises ValueError for what no simulation knows."""
        place, found, rest = text.partition("[")
        at, closed, kind = rest.partition("]=")
        if not found or not closed or kind not in KINDS.get(place, ()) or not at.isdecimal():
            known = "; ".join(f"{p}: {', '.join(k)}" for p, k in KINDS.items())
            raise ValueError(f"{text!r} is no fault; write PLACE[NUMBER]=KIND, with {known}")
        return cls(place, int(at), kind)


class Killed(SystemExit):
    """The simulated process is gone; passes through `except Exception` and through event loops."""


class Faults:
    """The schedule of one run, and how far it has come."""

    def __init__(self, schedule: Iterable[Fault] = ()) -> None:
        self.schedule: tuple[Fault, ...] = tuple(sorted(schedule))
        self.struck: list[Fault] = []
        self.counts: Counter[str] = Counter()
        self._waiting = {(f.place, f.at): f for f in self.schedule}

    @property
    def events(self) -> int:
        """All there have been."""
        return self.counts["driver"]

    def at(self, place: str) -> str | None:
        """Count one event of `place`; the kind of fault that strikes it, "kill" and "term" for the process's own."""
        found = None
        for name in (place, "driver", "preempt"):
            number, self.counts[name] = self.counts[name], self.counts[name] + 1
            fault = self._waiting.pop((name, number), None)
            if fault is not None:
                self.struck.append(fault)
                found = found or fault.kind
        return found


def drawn(rng: random.Random, places: Sequence[str], most: int = 4) -> list[Fault]:
    """Up to `most` faults at some of `places`; often none, often few."""
    faults: dict[tuple[str, int], Fault] = {}
    for _ in range(min(most, int(rng.expovariate(0.5)))):
        place = rng.choice(list(places))
        at = int(_EVENTS[place] * rng.random() ** 1.5)
        faults[place, at] = Fault(place, at, rng.choice(KINDS[place]))
    return sorted(faults.values())
