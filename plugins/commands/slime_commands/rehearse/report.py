"""Findings of a rehearsal -> lines of text and JSON, with the GPU minutes after which a run would have met each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from slime_core.protocols.command import Level
from slime_core.text import plain, table


@dataclass(frozen=True)
class Prices:
    """Predicted seconds of the run's parts (`slime plan`), and its GPUs."""

    gpus: int = 0
    generate: float | None = None
    train: float | None = None
    overlap: bool = False
    evaluate: float | None = None
    """Seconds of an evaluation, if there is one."""
    before_training: bool = False
    """Whether an evaluation comes before the first rollout."""
    save_interval: int | None = None

    def minutes(self, stage: str, rollouts: int = 0) -> float | None:
        """Return the GPU minutes until the stage of a run, after so many rollouts; None if the time is unknown.

        The start of engines and trainer is not predicted, so it counts as nothing.
        """
        if stage in ("settings", "layout", "inputs", "check"):
            return 0.0
        if self.generate is None or self.train is None:
            return None
        each = max(self.generate, self.train) if self.overlap else self.generate + self.train
        spent = rollouts * each
        if stage != "start" and self.before_training:
            spent += self.evaluate or 0.0
        commit = each * (self.save_interval or 1)
        spent += {"score": self.generate, "train": self.generate, "commit": commit, "resume": commit}.get(stage, 0.0)
        return self.gpus * spent / 60


@dataclass(frozen=True)
class Problem:
    """A finding of one stage."""

    stage: str
    level: Level
    message: str
    gpu_minutes: float | None = 0.0
    """GPU minutes that the run would have spent before; None if `slime plan` has no time."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "stage": self.stage, "level": self.level.value, "message": self.message, "gpu_minutes": self.gpu_minutes,
        }  # fmt: skip


@dataclass
class Report:
    """The result of a rehearsal."""

    problems: list[Problem] = field(default_factory=list)
    done: list[tuple[str, str]] = field(default_factory=list)
    """(stage, result) of each stage that was gone through."""
    predicted: list[str] = field(default_factory=list)
    """Lines of `slime plan`."""
    plan: dict[str, Any] | None = None
    gaps: list[str] = field(default_factory=list)
    """Parts that could not be rehearsed, with the reason."""
    prices: Prices = field(default_factory=Prices)
    seconds: float = 0.0

    def add(self, stage: str, level: Level, message: str, rollouts: int = 0) -> None:
        """Add a finding, unless it is there."""
        problem = Problem(stage, level, message, self.prices.minutes(stage, rollouts))
        if all(known.message != message for known in self.problems):
            self.problems.append(problem)

    def fails(self, *, strict: bool = False) -> bool:
        """Return whether the run would have failed; with `strict`, warnings count."""
        bad = {Level.ERROR, Level.WARNING} if strict else {Level.ERROR}
        return any(problem.level in bad for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "fails": self.fails(),
            "problems": [problem.to_dict() for problem in self.problems],
            "stages": [{"stage": stage, "result": result} for stage, result in self.done],
            "predicted": self.plan,
            "gpus": self.prices.gpus,
            "not_rehearsed": self.gaps,
            "seconds": round(self.seconds, 1),
        }

    def describe(self, *, strict: bool = False) -> Iterator[str]:
        """Yield readable lines."""
        if self.done:
            yield "rehearsed"
            yield from (f"  {line}" for line in table(self.done))
        if self.problems:
            yield "found"
            ordered = sorted(self.problems, key=lambda problem: problem.level != Level.ERROR)
            for problem in ordered:
                yield plain(f"  {problem.level.value:<8} {problem.stage}, {_after(problem)}: {problem.message}")
        if self.predicted:
            yield "predicted (slime plan)"
            yield from (f"  {line}" for line in self.predicted if line)
        if self.gaps:
            yield "not rehearsed"
            yield from (plain(f"  {gap}") for gap in self.gaps)
        failed = self.fails(strict=strict)
        yield f"{'would have failed' if failed else 'would have run'}; rehearsed in {self.seconds:.0f} s"


def _after(problem: Problem) -> str:
    if problem.gpu_minutes is None:
        return "after an unknown time"
    return "at once" if problem.gpu_minutes == 0 else f"after {problem.gpu_minutes:,.3g} GPU minutes and the start"
