"""Track a run with Weights & Biases, configured by the flags `--wandb-*`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from slime_hooks.trackers.numbers import Rollout, Tracked, histogram, settings_of

_ID = "wandb_run_id"
"""File in the run directory with the Weights & Biases id, for a resume."""


class Wandb:
    """A run in Weights & Biases."""

    def __init__(self, run: Tracked) -> None:
        import wandb

        suffix = f"_{secrets.token_hex(4)}" if run.args.wandb_random_suffix else ""
        known = run.run_dir / _ID
        before = known.read_text(encoding="utf-8").strip() if run.args.start_rollout_id and known.is_file() else None
        if run.args.wandb_host and run.args.wandb_mode not in ("offline", "disabled"):
            wandb.login(host=run.args.wandb_host)
        self._wandb = wandb
        self._run = wandb.init(
            project=run.args.wandb_project or "slime",
            entity=run.args.wandb_team,
            group=run.args.wandb_group,
            name=f"{run.args.wandb_group or run.run_dir.resolve().name}{suffix}",
            id=run.args.wandb_run_id or before,
            resume="allow" if run.args.wandb_run_id or before else None,
            dir=run.args.wandb_dir or str(run.run_dir),
            mode=run.args.wandb_mode,
            config=settings_of(run.args),
            settings=wandb.Settings(console="off", silent=True),
        )
        known.write_text(f"{self._run.id}\n", encoding="utf-8")
        per_step = run.args.num_steps_per_rollout or 1
        self._axis, self._scale = (
            ("train/step", per_step) if run.args.wandb_always_use_train_step else ("rollout/step", 1)
        )
        # Own step metric: a background evaluation is logged after later rollouts.
        self._run.define_metric("*", step_metric=self._axis)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self._run.log({self._axis: step * self._scale, **metrics})

    def rollout(self, found: Rollout) -> None:
        """Log the histograms, and the texts as a table."""
        values: dict[str, Any] = {
            f"{name}_histogram": self._wandb.Histogram(np_histogram=histogram(numbers, 64))
            for name, numbers in found.distributions.items()
            if numbers
        }
        if found.texts:
            values["rollout/samples"] = self._wandb.Table(
                ["prompt", "response", "reward"], [list(t) for t in found.texts]
            )
        self._run.log({self._axis: found.step * self._scale, **values})

    def close(self) -> None:
        """End the run."""
        self._run.finish()
