"""Write a run's timeline as a trace for https://ui.perfetto.dev and chrome://tracing (Trace Event Format, JSON array).

A file without its end, as after a killed run, opens too: each event is a line, and the last bracket is optional.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slime_hooks.trackers.tail import Tail

from slime_core.errors import rollout_number

_RUN, _TRAINERS, _SAMPLES = 1, 2, 3
_NAMES = {_RUN: "the loop", _TRAINERS: "trainers", _SAMPLES: "samples"}
_LANES = {"rollout": 1, "train": 2, "push": 3, "eval": 4, "save": 5}


class Trace:
    """A writer of a Perfetto trace: it creates a new file, then appends new events of the timeline."""

    def __init__(self, timeline: Path, path: Path) -> None:
        """Raises OSError."""
        self._tail, self._path = Tail(timeline), path
        self._free: list[float] = []
        """Time from which each lane of samples is free."""
        self._lanes = dict(_LANES)
        path.parent.mkdir(parents=True, exist_ok=True)
        names = [_named("process_name", pid, 0, name) for pid, name in _NAMES.items()]
        names += [_named("thread_name", _RUN, lane, name) for name, lane in _LANES.items()]
        path.write_text("[\n" + "".join(json.dumps(event) + ",\n" for event in names), encoding="utf-8")

    def update(self) -> int:
        """Append new events; return their number. Raises OSError."""
        events = sorted(
            self._tail.new(), key=lambda event: event["t"][0] if isinstance(event["t"], list) else event["t"]
        )
        made = [json.dumps(line) + ",\n" for event in events for line in self._lines(event)]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(made))
        return len(events)

    def close(self) -> None:
        """Append the remaining events and the closing bracket. Raises OSError."""
        self.update()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": "end", "ph": "M", "pid": _RUN}) + "]\n")

    def _lines(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        what, times = event["e"], event["t"]
        facts = {name: value for name, value in event.items() if name not in ("e", "t")}
        if what == "run":
            yield {"name": "start", "ph": "i", "s": "g", "pid": _RUN, "tid": 1, "ts": times * 1e6, "args": facts}
        elif what == "sample":
            lane = self._lane(times)
            name = f"{'evaluation ' if event.get('ev') else ''}sample {event['i']}"
            yield _span(name, _SAMPLES, lane, times[:2], facts)
            yield _span("scored", _SAMPLES, lane, times[1:], {})
        elif "rank" in event:
            yield _span(what, _TRAINERS, event["rank"], times, facts)
        else:
            lane = self._lanes.setdefault(what, len(self._lanes) + 1)
            yield _span(f"{what} {rollout_number(event['r'])}" if "r" in event else what, _RUN, lane, times, facts)

    def _lane(self, times: list[float]) -> int:
        """Return a lane that is free at the start time, since slices of one thread must not overlap."""
        for lane, free in enumerate(self._free):
            if free <= times[0]:
                self._free[lane] = times[-1]
                return lane
        self._free.append(times[-1])
        return len(self._free) - 1


def _span(name: str, pid: int, tid: int, times: Iterable[float], facts: dict[str, Any]) -> dict[str, Any]:
    start, end = times
    place = {"ph": "X", "pid": pid, "tid": tid, "ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"name": name, **place, "args": facts}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
