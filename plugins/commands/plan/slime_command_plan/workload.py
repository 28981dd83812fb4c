"""What a run has to do and how fast it does it: the input of the simulation, and how it is read from a trace.

`slime plan --trace` reads it from `trace.jsonl` (`read_workload`); a benchmark builds it from what it knows. Seconds
and tokens throughout. Groups that were aborted and never finished have no known length, so they are left out, and a
trace with much over-sampling makes responses look shorter than they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from slime_runs.files import read_lines

from slime_core.errors import ConfigError
from slime_core.observability.timeline import FILE

_FINISHED = ("completed", "truncated")


@dataclass(frozen=True)
class GroupWork:
    """One prompt group."""

    tokens: tuple[int, ...]
    """Response tokens of each sample."""
    prompt: int = 0
    """Tokens of the prompt."""
    after: float = 0.0
    """Seconds between a sample's last token and its reward; its place stays taken."""
    group_after: float = 0.0
    """Seconds that a reward of the whole group takes once all samples are there."""


@dataclass(frozen=True)
class Speed:
    """Of one engine, which generates for all its samples together (continuous batching).

    A sample gets its next token after `per_step + per_active * active` seconds while `active` samples share the engine.
    """

    per_step: float
    per_active: float = 0.0
    latency: float = 0.0
    """Seconds of a sample besides its tokens: prompt, request."""

    def token_seconds(self, active: int) -> float:
        """Seconds per token of each of `active` samples."""
        return self.per_step + self.per_active * active


@dataclass(frozen=True)
class Workload:
    """What is to be generated and trained, and what the parts of a step take."""

    groups: tuple[GroupWork, ...]
    """In the order they are drawn; after the last one it begins again."""
    speed: Speed
    train_fixed: float = 0.0
    """Seconds of training a rollout, whatever its size."""
    train_per_token: float = 0.0
    """Seconds per token, prompt included."""
    push: float = 0.0
    evaluate: float = 0.0
    save: float = 0.0
    accepted: float = 1.0
    """Share of finished groups that filters keep."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Those of the recorded run."""

    def train_seconds(self, tokens: int) -> float:
        """Of a rollout with so many tokens."""
        return self.train_fixed + self.train_per_token * tokens


@dataclass(frozen=True)
class Recorded:
    """What the trace says happened."""

    step_seconds: float
    """Mean from the end of one rollout's training to the end of the next one's."""
    trainer_idle: float
    engine_idle: float
    steps: int


def read_workload(run: Path) -> tuple[Workload, Recorded]:
    """The last part of a recorded run: since it was last started.

    Args:
        run: Run directory, or a trace file.

    Raises:
        ConfigError: There is no trace, or too little in it.
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
    """See `read_workload`; `path` is for messages. Raises ConfigError."""
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
    """Engines of the recorded run, as far as its flags say."""
    gpus = settings.get("rollout_num_gpus")
    return max(1, gpus // (settings.get("rollout_num_gpus_per_engine") or 1)) if gpus else 1


def fit_speed(samples: Iterable[Mapping[str, Any]], engines: int = 1) -> Speed:
    """Least squares of seconds = tokens * (per_step + per_active * active) + latency, none of them negative.

    Args:
        samples: Sample events of a trace.
        engines: Share the samples evenly.
    """
    rows = [(e["t"][0], e["t"][1], e["n"]) for e in samples if e["n"] > 0 and e["t"][1] > e["t"][0]]
    start, end, tokens = (np.array(column, dtype=float) for column in zip(*rows))
    # Active samples over time, and its integral, so that each sample's mean company is one difference.
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
    if not found[:2].any():  # latency alone explains it best: still, more tokens take longer
        found[0] = float((end - start).sum() / tokens.sum())
        found[2] = 0.0
    return Speed(*map(float, found))


def _groups(samples: Iterable[Mapping[str, Any]], scored: Iterable[Mapping[str, Any]], speed: Speed) -> list[GroupWork]:
    """By group index, the complete ones."""
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
    """Seconds per rollout and per token; the first, with its warm-up, counts only where there are few."""
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
    """Groups that were trained on, of those that finished."""
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
    """Seconds between `begin` and `end` that lie in any of them."""
    total, reached = 0.0, begin
    for start, stop in sorted(intervals):
        start, stop = max(start, reached), min(stop, end)
        if stop > start:
            total += stop - start
            reached = stop
    return total
