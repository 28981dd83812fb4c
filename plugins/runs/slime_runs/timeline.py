"""`trace.jsonl` in the run directory: start and end times of each sample and each part of a step.

`slime plan --trace RUN` predicts the speed of other settings from it. The rollout stage writes samples
(`Timeline.sample`); the launcher wraps the loop's stages (`timed_stages`); both find this module by the entry-point
group `slime.metrics`. Both may run in different processes: whole lines are appended, so processes share the file.
Writes are buffered, a few microseconds per sample. After TRACE_BYTES of samples only steps are recorded.

Times are seconds since 1970 by a monotonic clock. The file records events, not the run's state: a resumed run appends
a line `{"e": "run"}` and then its events, so a repeated rollout appears twice.

Example::

    {"e": "run", "t": 12.0, "start": 0, "settings": {"rollout_batch_size": 4, ...}}
    {"e": "sample", "r": 0, "g": 3, "i": 13, "t": [12.1, 12.9, 13.0], "p": 20, "k": 0, "n": 64, "v": 1, ...}
                                                   start, generated, scored; prompt tokens, tokens before, new tokens;
                                                   "w" and "o" where they are: seconds of waiting for a place before the
                                                   start, and of tools between start and generated
    {"e": "train", "r": 0, "t": [13.2, 14.0]}
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from slime_core.protocols import Args, GenerateContext

logger = logging.getLogger(__name__)

FILE = "trace.jsonl"
TRACE_BYTES = 64 << 20
"""Size limit of the samples in a trace: some 400,000 samples."""
_BUFFER_BYTES = 64 << 10
_NOTED_S = 1e-3
_FLUSH_EVERY = 1.0
"""Longest time between two writes of the buffer, in seconds."""
SETTINGS = (
    "async_buffer_groups", "async_mode", "async_training", "colocate", "eval_interval", "global_batch_size",
    "max_staleness", "n_samples_per_prompt", "num_rollout", "over_sampling_batch_size", "partial_rollout",
    "rollout_batch_size", "rollout_max_response_len", "rollout_num_gpus", "rollout_num_gpus_per_engine",
    "save_interval", "sglang_server_concurrency", "staleness_max_retries", "staleness_policy",
    "update_weights_interval",
)  # fmt: skip
"""Settings that `slime plan` needs to reproduce the recorded run."""
_SPANS: Mapping[str, Mapping[str, str]] = {
    "rollout": {"generate": "rollout", "evaluate": "eval"},
    "learner": {"train": "train"},
    "weights": {"push": "push"},
    "journal": {"save": "save"},
}
"""Part of the loop's stages -> method -> event."""
_KEPT = ("rollout/groups_drawn", "rollout/groups_given_back", "rollout/surplus_groups")
"""Metrics of a rollout that are recorded with it."""


class Timeline:
    """Appends events to the file. With `path` None nothing is recorded; the first flush creates the file."""

    def __init__(self, path: Path | None, *, limit: int = TRACE_BYTES) -> None:
        self._path = path
        self._room = limit
        self._lines: list[bytes] = []
        self._buffered = 0
        self._flushed = 0.0
        self._lock = threading.Lock()
        self._epoch = time.time() - time.perf_counter()

    def __bool__(self) -> bool:
        return self._path is not None

    def now(self) -> float:
        """Return the time in seconds since 1970."""
        return self._epoch + time.perf_counter()

    def begin(self, args: Args, start: int) -> None:
        """Record the settings of the events that follow; `start` is the first rollout."""
        settings = {name: getattr(args, name, None) for name in SETTINGS}
        self._write({"e": "run", "t": round(self.now(), 6), "start": start, "settings": settings}, flush=True)

    def sample(
        self, siblings: list[Any], times: tuple[float, ...], before: int, outside: float, context: GenerateContext
    ) -> None:
        """Record the samples that one call of a generate function returned.

        Args:
            siblings: Samples of one origin; more than one after fan-out.
            times: Times at which the call was queued, began, was generated and was scored.
            before: Response tokens at the start of the call (partial rollouts).
            outside: Seconds spent outside of the engine before the call.
            context: The context that the function was called with.
        """
        if self._path is None or self._room <= 0:
            return
        first = siblings[0]
        tokens = sum(s.response_length for s in siblings)
        versions = [v for s in siblings for v in s.token_weight_versions[:1]]
        event: dict[str, Any] = {
            "e": "sample",
            "r": context.rollout_id,
            "g": first.group_index,
            "i": first.index,
            "t": [round(t, 6) for t in times[1:]],
            "p": len(first.tokens) - first.response_length,
            "k": before,
            "n": max(0, tokens - before),
            "turns": max(1, len(first.weight_versions)),
            "s": str(getattr(first.status, "value", first.status)),
            "v": min(versions, default=None),
        }
        outside = sum(s.non_generation_time for s in siblings) - outside
        event |= {name: round(s, 6) for name, s in (("w", times[1] - times[0]), ("o", outside)) if s > _NOTED_S}
        if context.evaluation:
            event["ev"] = True
        if len(siblings) > 1:
            event["fan"] = len(siblings)
        self._room -= self._write(event)

    def scored(self, group: list[Any], start: float) -> None:
        """Record that a group was scored as a whole, from `start` until now."""
        if self._room > 0 and group:
            self._room -= self._write(
                {"e": "scored", "g": group[0].group_index, "t": [round(start, 6), round(self.now(), 6)]}
            )

    def span(self, event: str, start: float, end: float | None = None, **details: Any) -> None:
        """Record an event that began at `start` and ended at `end`, by default now."""
        times = [round(start, 6), round(self.now() if end is None else end, 6)]
        self._write({"e": event, "t": times, **details}, flush=True)

    def flush(self) -> None:
        """Write the buffered lines. If that fails, log a warning and record nothing more."""
        with self._lock:
            lines, self._lines, self._buffered = self._lines, [], 0
            self._flushed = time.perf_counter()
            if not lines or self._path is None:
                return
            try:
                with self._path.open("ab") as file:
                    file.write(b"".join(lines))
            except OSError as error:
                logger.warning("%s: %s; nothing more is recorded there (--no-trace)", self._path, error)
                self._path = None

    def _write(self, event: dict[str, Any], *, flush: bool = False) -> int:
        if self._path is None:
            return 0
        # A kill may have torn the last line of the file: the next one begins on a line of its own.
        line = (b"\n" if event["e"] == "run" else b"") + orjson.dumps(event) + b"\n"
        with self._lock:
            self._lines.append(line)
            self._buffered += len(line)
        if flush or self._buffered > _BUFFER_BYTES or time.perf_counter() - self._flushed > _FLUSH_EVERY:
            self.flush()
        return len(line)


def open_timeline(args: Args) -> Timeline:
    """Return the run's timeline; with `--no-trace` it records nothing."""
    return Timeline(Path(args.run_dir) / FILE if args.trace and args.run_dir else None)


def timed_stages(stages: Any, args: Args, start: int) -> Any:
    """Wrap `loop.Stages` so that the times of their methods are recorded; unchanged with `--no-trace`.

    Args:
        stages: The loop's stages.
        args: The run's settings, which are recorded too.
        start: The first rollout.
    """
    timeline = open_timeline(args)
    if not timeline:
        return stages
    timeline.begin(args, start)
    return replace(stages, **{part: _Timed(getattr(stages, part), timeline, names) for part, names in _SPANS.items()})


class _Timed:
    """A stage that records the times of its methods."""

    def __init__(self, part: Any, timeline: Timeline, names: Mapping[str, str]) -> None:
        self._part, self._timeline, self._names = part, timeline, names

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        return value if name not in self._names else self._timed(value, self._names[name])

    def _timed(self, verb: Callable[..., Any], event: str) -> Callable[..., Any]:
        timeline = self._timeline

        async def wait(result: Any, start: float, arguments: tuple[Any, ...]) -> Any:
            result = await result
            timeline.span(event, start, **_details(arguments, result))
            return result

        @functools.wraps(verb)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            start = timeline.now()
            result = verb(*arguments, **keywords)
            if inspect.isawaitable(result):
                return wait(result, start, arguments)
            timeline.span(event, start, **_details(arguments, result))
            return result

        return timed


def _details(arguments: tuple[Any, ...], result: Any) -> dict[str, Any]:
    """Return the rollout's number, and the sizes of its batch that predictions need."""
    details: dict[str, Any] = {"r": arguments[0]} if arguments and isinstance(arguments[0], int) else {}
    batch = getattr(result, "batch", None)
    if batch is not None:
        details["samples"] = len(batch)
        there = getattr(batch, "num_tokens", None)  # of a batch that lives in another process
        details["tokens"] = sum(map(len, batch.tokens)) if there is None else there
    metrics = getattr(result, "metrics", None)
    if isinstance(metrics, Mapping):
        details |= {name.removeprefix("rollout/"): metrics[name] for name in _KEPT if name in metrics}
    return details
