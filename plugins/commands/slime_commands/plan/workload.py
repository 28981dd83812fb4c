"""The work and the speed of a run: the input of the simulation, read from a trace.

`slime plan --trace` reads a `Workload` from `trace.jsonl` (`read_workload`); a benchmark builds its own. All units are
seconds and tokens. Groups that were aborted and never finished have no known length, so they are left out. A trace with
much over-sampling therefore makes responses look shorter than they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from slime_runs.files import read_lines
from slime_runs.timeline import FILE

from slime_core.errors import ConfigError

_FINISHED = ("completed", "truncated")


@dataclass(frozen=True)
class GroupWork:
    """The work of one prompt group."""

    tokens: tuple[int, ...]
    """Response tokens of each sample."""
    prompt: int = 0
    """Tokens of the prompt."""
    after: float = 0.0
    """Seconds between a sample's last token and its reward; the sample keeps its place meanwhile."""
    group_after: float = 0.0
    """Seconds that a reward of the whole group takes after the last sample."""


@dataclass(frozen=True)
class Speed:
    """The speed of one engine, which generates all its samples together (continuous batching).

    A sample gets its next token after `per_step + per_active * active` seconds while `active` samples share the engine.
    """

    per_step: float
    per_active: float = 0.0
    latency: float = 0.0
    """Seconds of a sample in addition to its tokens: prompt, request."""

    def token_seconds(self, active: int) -> float:
        """Return the seconds per token of each of `active` samples."""
        return self.per_step + self.per_active * active


@dataclass(frozen=True)
class Workload:
    """The groups to generate and train on, and the times of the parts of a step."""

    groups: tuple[GroupWork, ...]
    """Groups in the order in which they are drawn; after the last group the first follows."""
    speed: Speed
    train_fixed: float = 0.0
    """Seconds of training a rollout, independent of its size."""
    train_per_token: float = 0.0
    """Seconds of training per token, including prompt tokens."""
    push: float = 0.0
    evaluate: float = 0.0
    save: float = 0.0
    accepted: float = 1.0
    """Share of finished groups that filters keep."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the recorded run."""

    def train_seconds(self, tokens: int) -> float:
        """Return the seconds of training a rollout with `tokens` tokens."""
        return self.train_fixed + self.train_per_token * tokens


@dataclass(frozen=True)
class Recorded:
    """Measurements of the recorded run."""

    step_seconds: float
    """Mean time from the end of a rollout's training to the end of the next rollout's training."""
    trainer_idle: float
    engine_idle: float
    steps: int


def read_workload(run: Path) -> tuple[Workload, Recorded]:
    """Read the last part of a recorded run, since its last start.

    Args:
        run: Run directory, or a trace file.

    Raises:
        ConfigError: The trace is missing or too short.
    """
    path = run / FILE if run.is_dir() else run
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; a run writes it unless it was started with --no-trace")
    events: list[dict[str, Any]] = []
    settings: Mapping[str, Any] = {}
    for event in read_lines(path):
        if event["e"] == "run":
            events, settings = [], event["settings"]
        else:
            events.append(event)
    return workload_of(events, settings, str(path))


def workload_of(
    events: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], path: str
) -> tuple[Workload, Recorded]:
    """Build the workload from events, as in `read_workload`; `path` is for messages. Raises ConfigError."""
    samples = [e for e in events if e["e"] == "sample"]
    spans = {name: [e for e in events if e["e"] == name] for name in ("rollout", "train", "push", "eval", "save")}
    trained = spans["train"]
    if len(trained) < 2 or not any(e["s"] in _FINISHED for e in samples if "ev" not in e):
        raise ConfigError(
            f"{path}: {len(trained)} trained rollouts and {len(samples)} samples; a prediction needs two rollouts with"
            " finished samples"
        )
    speed = fit_speed(samples, engines_in(settings))
    groups = _groups(samples, [e for e in events if e["e"] == "scored"], speed)
    fixed, per_token = _fit_training(spans["rollout"], trained)
    workload = Workload(
        groups=tuple(groups),
        speed=speed,
        train_fixed=fixed,
        train_per_token=per_token,
        push=_mean(spans["push"][1:] or spans["push"]),
        evaluate=_mean(spans["eval"]),
        save=_mean(spans["save"]),
        accepted=_accepted(spans["rollout"], settings),
        settings=dict(settings),
    )
    return workload, _recorded(samples, trained)


def engines_in(settings: Mapping[str, Any]) -> int:
    """Return the number of engines of the recorded run, from its GPU flags; 1 without them."""
    gpus = settings.get("rollout_num_gpus")
    return max(1, gpus // (settings.get("rollout_num_gpus_per_engine") or 1)) if gpus else 1


def fit_speed(samples: Iterable[Mapping[str, Any]], engines: int = 1) -> Speed:
    """Fit seconds = tokens * (per_step + per_active * active) + latency by least squares, with no negative term.

    Args:
        samples: Sample events of a trace.
        engines: Number of engines, which share the samples evenly.
    """
    rows = [(e["t"][0], e["t"][1], e["n"]) for e in samples if e["n"] > 0 and e["t"][1] > e["t"][0]]
    start, end, tokens = (np.array(column, dtype=float) for column in zip(*rows))
    # Active samples over time, and their integral: the mean number of active samples of each sample is a difference.
    times = np.concatenate([start, end])
    order = np.argsort(times, kind="stable")
    times = times[order]
    active = np.cumsum(np.concatenate([np.ones(len(start)), -np.ones(len(end))])[order])
    area = np.concatenate([[0.0], np.cumsum(active[:-1] * np.diff(times))])
    company = (np.interp(end, times, area) - np.interp(start, times, area)) / (end - start) / engines
    columns = np.stack([tokens, tokens * company, np.ones(len(tokens))], axis=1)
    best, found = np.inf, np.zeros(3)
    for used in itertools.chain.from_iterable(itertools.combinations(range(3), k) for k in (1, 2, 3)):
        answer, *_ = np.linalg.lstsq(columns[:, used], end - start, rcond=None)
        error = float(np.sum((columns[:, used] @ answer - (end - start)) ** 2))
        if (answer >= 0).all() and error < best * (1 - 1e-6):
            best, found = error, np.zeros(3)
            found[list(used)] = answer
    if not found[:2].any():  # latency alone fits best, but more tokens must take longer
        found[0] = float((end - start).sum() / tokens.sum())
        found[2] = 0.0
    return Speed(*map(float, found))


def _groups(samples: Iterable[Mapping[str, Any]], scored: Iterable[Mapping[str, Any]], speed: Speed) -> list[GroupWork]:
    """Return the complete groups, ordered by group index."""
    found: dict[int, dict[int, Mapping[str, Any]]] = {}
    broken: set[int] = set()
    for event in samples:
        if "ev" in event or event["g"] is None:
            continue
        if event["s"] in _FINISHED:
            found.setdefault(event["g"], {})[event["i"]] = event
            broken.discard(event["g"])
        else:
            broken.add(event["g"])
    together = {e["g"]: e["t"][1] - e["t"][0] for e in scored}
    groups = []
    for number, members in sorted(found.items()):
        if number in broken:
            continue
        after = [e["t"][2] - e["t"][1] for e in members.values()]
        groups.append(
            GroupWork(
                tokens=tuple(int(e["k"] + e["n"]) for _, e in sorted(members.items())),
                prompt=int(next(iter(members.values()))["p"]),
                after=sum(after) / len(after),
                group_after=together.get(number, 0.0),
            )
        )
    return groups


def _fit_training(rollouts: Sequence[Mapping[str, Any]], trained: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Fit the seconds per rollout and per token; the first rollout, a warm-up, counts only if there are few."""
    tokens_of = {e["r"]: e.get("tokens", 0) for e in rollouts}
    pairs = [(tokens_of.get(e["r"], 0), e["t"][1] - e["t"][0]) for e in trained]
    pairs = pairs[1:] if len(pairs) > 3 else pairs
    tokens, seconds = (np.array(column, dtype=float) for column in zip(*pairs))
    if not tokens.all():
        return float(seconds.mean()), 0.0
    if len(pairs) >= 3 and np.ptp(tokens) > 0.05 * tokens.mean():
        slope, fixed = np.polyfit(tokens, seconds, 1)
        if slope >= 0 and fixed >= 0:
            return float(fixed), float(slope)
    return 0.0, float(seconds.sum() / tokens.sum())


def _accepted(rollouts: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> float:
    """Return the share of finished groups that were trained on."""
    size = settings.get("rollout_batch_size")
    drawn = sum(e.get("groups_drawn", 0) for e in rollouts)
    back = sum(e.get("groups_given_back", 0) for e in rollouts)
    if not size or not drawn or drawn <= back:
        return 1.0
    return float(min(1.0, size * len(rollouts) / (drawn - back)))


def _mean(spans: Sequence[Mapping[str, Any]]) -> float:
    return float(sum(e["t"][1] - e["t"][0] for e in spans) / len(spans)) if spans else 0.0


def _recorded(samples: Sequence[Mapping[str, Any]], trained: Sequence[Mapping[str, Any]]) -> Recorded:
    begin, end = trained[0]["t"][1], trained[-1]["t"][1]
    busy = sum(e["t"][1] - e["t"][0] for e in trained[1:])
    return Recorded(
        step_seconds=(end - begin) / (len(trained) - 1),
        trainer_idle=1 - busy / (end - begin),
        engine_idle=1 - _covered([(e["t"][0], e["t"][1]) for e in samples], begin, end) / (end - begin),
        steps=len(trained),
    )


def _covered(intervals: list[tuple[float, float]], begin: float, end: float) -> float:
    """Return the seconds between `begin` and `end` that any interval covers."""
    total, reached = 0.0, begin
    for start, stop in sorted(intervals):
        start, stop = max(start, reached), min(stop, end)
        if stop > start:
            total += stop - start
            reached = stop
    return total
