"""Record metrics with trackio: a local database (`TRACKIO_DIR`), shown by `trackio show`."""

from __future__ import annotations

from collections.abc import Mapping

from slime_hooks.trackers.numbers import Tracked, settings_of


class Trackio:
    """A run in trackio's project "slime"."""

    def __init__(self, run: Tracked) -> None:
        import trackio

        self._run = trackio.init(
            project="slime", name=run.run_dir.resolve().name, config=settings_of(run.args), resume="allow", embed=False
        )

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()
