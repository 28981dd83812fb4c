"""The records of a run for Python: what `slime show` reads, as DataFrame, plot and HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_runs.run import Run as RunRecords
from slime_runs.scores import data_sets

from slime_core.errors import ConfigError, did_you_mean
from slime_python.html import CURVES, notebook, run_html


class Run(RunRecords):
    """The records of a run: metrics, samples, checkpoints, as `slime show` reads them."""

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}): {self.state()}"

    def frame(self) -> Any:
        """Return the metrics as a pandas DataFrame, one row per step. Raises ConfigError without pandas."""
        try:
            import pandas
        except ImportError:
            raise ConfigError(
                "run.frame(): needs pandas: pip install pandas; run.metrics() is a list of dicts"
            ) from None
        lines = self.metrics()
        return pandas.DataFrame(lines).set_index("step") if lines else pandas.DataFrame()

    def plot(self, *names: str) -> Any:
        """Return a matplotlib figure with a curve per metric; by default reward, length, loss and evaluations.

        Raises:
            ConfigError: No step has a metric, or matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ConfigError("run.plot(): type pip install matplotlib") from None
        shown = self._checked(names) if names else list(self.curves())
        if (shell := notebook()) is not None:
            from IPython.core.pylabtools import select_figure_formats

            select_figure_formats(shell, {"png"})  # type: ignore[no-untyped-call]
        figure = Figure(figsize=(4 * max(len(shown), 1), 3), layout="constrained")
        for place, name in enumerate(shown, 1):
            axes = figure.add_subplot(1, len(shown), place)
            axes.plot(*zip(*self.series(name)), marker=".")
            axes.set_title(name)
            axes.set_xlabel("rollouts")
        return figure

    def _checked(self, names: tuple[str, ...]) -> list[str]:
        known = sorted({name for line in self.metrics() for name in line})
        for name in names:
            if name not in known:
                hint = did_you_mean(name, known) or f" There are {', '.join(known)}"
                raise ConfigError(f"run.plot({name!r}): no step has this metric.{hint}")
        return list(names)

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Return the points of the metrics in `CURVES` and of evaluations that have any."""
        lines = self.metrics()
        scores = [f"eval/{name}" for name in data_sets(name for line in lines for name in line)]
        found = {name: [(line["step"], line[name]) for line in lines if line.get(name) is not None]
                 for name in (*scores, *CURVES)}  # fmt: skip
        return {name: points for name, points in found.items() if points}

    @property
    def checkpoint(self) -> Path | None:
        """The newest commit; None before the first."""
        commits = sorted(self.checkpoints.glob("rollout_*"))
        return commits[-1] if commits else None

    def newest(self, number: int = 4) -> list[Any]:
        """Return some of the newest samples that are stored."""
        return [stored.sample for stored in self.samples(limit=number)]

    def _repr_html_(self) -> str:
        """Return curves and the newest samples, for notebooks."""
        return run_html(self)
