"""The record of a run: metrics through the hooks, checkpoints, and `summary.json`.

Only rank 0 has a `Journal`; the other training processes record nothing (`launch.roles`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_core.checkpoint.run_dir import CHECKPOINTS, check_there, versions, write_summary
from slime_core.checkpoint.store import CheckpointStore, rollout_of
from slime_core.distributions import provided
from slime_core.errors import PluginError
from slime_core.launch.lock import settle_replaced
from slime_core.plugins.hooks import Hooks
from slime_core.protocols import Args
from slime_core.waits import named, progress


@dataclass
class Journal:
    """Records a run in its directory and calls the hooks."""

    args: Args
    run_dir: Path
    hooks: Hooks
    writers: list[Callable[[Path, int], None]]
    """Functions that fill a checkpoint directory; the second argument is the number of the rollout."""
    facts: Callable[[], dict[str, object]]
    """Returns the other state that a commit stores."""
    plugins: list[dict[str, object]]
    started: float
    """`time.perf_counter()` at the start of the command, so preparation counts as part of the run."""
    checkpoint: Path | None = None
    evals: dict[str, dict[str, float]] = field(default_factory=dict)
    """Data set -> {"before", "after"}: the first and the newest score; "...-stderr": their standard errors."""
    scores: dict[str, dict[int, float]] = field(default_factory=dict)
    """Data set -> rollout -> score of the weights after that rollout."""
    seconds_before: float = 0.0
    """Wall time of the run up to the checkpoint it resumed from."""

    def __post_init__(self) -> None:
        self.store = CheckpointStore(Path(self.args.save or self.run_dir) / CHECKPOINTS)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics under `step`, the number of finished rollouts; empty metrics are not recorded."""
        if not metrics:
            return
        for dataset in self.args.eval_datasets or []:
            name = f"eval/{dataset.name}"
            if name in metrics:
                now = {key: metrics[name + key] for key in ("", "-stderr") if name + key in metrics}
                scores = self.evals.setdefault(dataset.name, {f"before{key}": now[key] for key in now})
                scores |= {f"after{key}": now[key] for key in now}
                self.scores.setdefault(dataset.name, {})[step - 1] = now[""]
        check_there(self.run_dir)
        self.hooks.slime_log_metrics(step=step, metrics=metrics)
        if self.args.overwrite:
            settle_replaced(self.args)

    def step_end(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a rollout that has been trained on."""
        progress(step=rollout_id + 1)
        self.log(rollout_id + 1, metrics)
        self.hooks.slime_step_end(rollout_id=rollout_id, metrics=metrics)

    @named("checkpoint of {0}", deadline="save_timeout", then="the process ends (--save-timeout)", stop=True)
    def save(self, rollout_id: int) -> None:
        """Commit a checkpoint. Raises CheckpointError."""
        state = {
            **self.facts(),
            "evals": self.evals,
            "seconds": self.seconds(),
            "plugins": self.plugins,
            "plugin_state": _merged([found for found in self.hooks.slime_save_state() if found]),
            "scores": self.scores,
        }
        writers = [lambda directory, write=write: write(directory, rollout_id) for write in self.writers]
        self.checkpoint = self.store.commit(
            rollout_id, state, writers, keep=self.args.keep_checkpoints, spared=self.best(rollout_id)
        )
        if self.args.save_hf:
            target = Path(self.args.save_hf.format(rollout_id=rollout_id))
            provided("slime.api", "export_hf")(self.checkpoint, target)
        self.hooks.slime_checkpoint_saved(path=self.checkpoint, rollout_id=rollout_id)

    def best(self, *rollouts: int) -> set[int]:
        """Return the rollout with the best score of each evaluation data set, among the commits and `rollouts`."""
        there = {*map(rollout_of, self.store.commits()), *rollouts}
        scores = [{r: score for r, score in of.items() if r in there} for of in self.scores.values()]
        return {max(of, key=lambda r: (of[r], r)) for of in scores if of}

    def restore(self, commit: Path, state: Mapping[str, Any]) -> None:
        """Load the record of the resumed run."""
        self.checkpoint = commit
        self.evals = {name: dict(scores) for name, scores in state["evals"].items()}
        scores = state.get("scores", {})
        self.scores = {name: {int(rollout): score for rollout, score in of.items()} for name, of in scores.items()}
        self.seconds_before = float(state["seconds"])
        if state.get("plugin_state"):
            self.hooks.slime_load_state(state=state["plugin_state"])

    def rewind(self, commit: Path, state: Mapping[str, object]) -> None:
        """Restore in the middle of a run: discard the record after the commit, but keep its wall time."""
        before = self.seconds_before
        self.restore(commit, state)
        self.seconds_before = before

    def seconds(self) -> float:
        """Return the wall time of the run without interruptions."""
        return self.seconds_before + time.perf_counter() - self.started

    def finish(
        self, command: str, rollouts: int, resumed_from: str | None, *, early: bool = False
    ) -> dict[str, object]:
        """Write and return `summary.json`; `early` if a drain ended the run before its last rollout."""
        first = next(iter(self.evals.values()), {})
        summary: dict[str, object] = {
            "command": command,
            "rollouts": rollouts,
            "drained": early,
            "seed": self.args.seed,
            "wall_seconds": round(self.seconds(), 3),
            "eval_before": first.get("before"),
            "eval_after": first.get("after"),
            "evals": self.evals,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "resumed_from": resumed_from,
            "versions": versions(),
            "plugins": self.plugins,
        }
        write_summary(self.run_dir, summary)
        return summary


def _merged(states: list[Any]) -> dict[str, object]:
    """Merge the plugins' states into one mapping. Raises PluginError if a state is not JSON."""
    merged: dict[str, object] = {}
    for state in states:
        try:
            merged |= json.loads(json.dumps(dict(state)))
        except (TypeError, ValueError) as error:
            raise PluginError(
                f"a plugin's hook slime_save_state returned {state!r:.200}; expected a mapping of JSON values: {error}"
            ) from error
    return merged
