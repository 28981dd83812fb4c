"""Adaptive KL controller: moves `--kl-coef` or `--kl-loss-coef` so that the KL to the reference stays near a target.

    coefficient *= 1 + rate * clip(KL / target - 1, -0.2, 0.2)        after every rollout

(Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv 1909.08593, 2019, section 2.2). KL is
`rollout/kl` with `--kl-coef`, `train/kl_loss` with `--kl-loss-coef`: a mean over all ranks, so that every trainer
process takes the same step by itself. A commit holds the coefficient; each process of a resumed run reads it there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, PositiveFloat

from slime_core import Args, PluginOptions, Sample, hookimpl, options
from slime_core.errors import ConfigError

if TYPE_CHECKING:
    from slime_core.learning.report import TrainedRollout

__all__ = ["AdaptiveKL"]

_STATE = "slime-hooks/adaptive_kl"
_LARGEST_ERROR = 0.2
_METRICS = {"kl_coef": "rollout/kl", "kl_loss_coef": "train/kl_loss"}


class Options(PluginOptions):
    """`plugins.adaptive_kl.*`"""

    target: PositiveFloat | None = None
    """KL to the reference per token, in nats, as the metric has it; without it the coefficient is constant."""
    rate: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Largest relative change of the coefficient per rollout is a fifth of this."""


def updated(coefficient: float, kl: float, target: float, rate: float) -> float:
    """Return the next coefficient; the same for a KL that is not a number, as after a step that was skipped."""
    if math.isnan(kl):
        return coefficient
    return coefficient * (1 + rate * min(max(kl / target - 1, -_LARGEST_ERROR), _LARGEST_ERROR))


class AdaptiveKL:
    """The controller of one process; changes the setting that estimators and losses read."""

    Options: ClassVar[type[PluginOptions]] = Options

    def __init__(self) -> None:
        self._args: Args | None = None
        self._options = Options()
        self._name = ""
        """Setting that is moved; empty without a target."""
        self._rollout: int | None = None
        """Last rollout that was taken into account."""
        self._moved = False
        """True once the coefficient differs from the setting."""

    @hookimpl
    def slime_configure(self, args: Args) -> None:
        """Check the settings; a resumed run takes the coefficient of its commit."""
        self._options, self._name = options(args, "adaptive_kl", Options), ""
        self._rollout, self._moved = None, False
        if self._options.target is None:
            return
        used = [name for name in ("kl_coef", "kl_loss_coef") if getattr(args, name)]
        if not used or (used == ["kl_loss_coef"] and not args.use_kl_loss):
            raise ConfigError(
                f"plugins.adaptive_kl.target {self._options.target:g}: there is no KL coefficient to move; type"
                " --kl-coef 0.01, or --use-kl-loss --kl-loss-coef 0.01"
            )
        if args.max_trainer_restarts:
            raise ConfigError(
                f"--max-trainer-restarts {args.max_trainer_restarts}: a restarted trainer does not know the coefficient"
                " of plugins.adaptive_kl; remove one"
            )
        self._args, self._name = args, used[0]
        state = _state(args)
        if state and state["setting"] == self._name:
            setattr(args, self._name, float(state["coefficient"]))
            self._moved = True

    @hookimpl
    def slime_rollout_trained(self, args: Args, trained: TrainedRollout) -> None:
        """Move the coefficient in a trainer process."""
        if not self._name:
            return
        from slime_core.learning.packing import over_steps
        from slime_core.learning.report import rollout_report

        found: dict[str, float] = {}
        if self._name == "kl_coef":
            found = rollout_report(trained.batch, trained.local, trained.tensors, None, trained.trainer)
        elif trained.steps:
            found = {f"train/{name}": value for name, value in over_steps(trained.steps).items()}
        self._move(trained.batch.rollout_id, found)

    @hookimpl
    def slime_step_end(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Move the coefficient in the leading process, if that does not train."""
        self._move(rollout_id, metrics)

    def _move(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        kl = metrics.get(_METRICS.get(self._name, ""))
        if kl is None or self._rollout == rollout_id:
            return
        assert self._args is not None
        assert self._options.target is not None
        before = getattr(self._args, self._name)
        setattr(self._args, self._name, updated(before, kl, self._options.target, self._options.rate))
        self._rollout, self._moved = rollout_id, True

    @hookimpl
    def slime_log_rollout(self, args: Args, samples: list[Sample], extra_metrics: dict[str, float]) -> None:
        """Record the coefficient as `rollout/kl_coefficient`, where the process that generates also trains."""
        if self._name and self._moved:
            extra_metrics["rollout/kl_coefficient"] = getattr(args, self._name)

    @hookimpl
    def slime_save_state(self) -> dict[str, Any]:
        """Return the coefficient of the next rollout."""
        if not self._name:
            return {}
        return {_STATE: {"setting": self._name, "coefficient": getattr(self._args, self._name)}}


def _state(args: Args) -> dict[str, Any]:
    """Return the state in the commit that the run resumes from; {} for a fresh start. Raises CheckpointError."""
    if not args.load or args.finetune:
        return {}
    from slime_core.checkpoint.store import find, read_state

    commit = find(args.load, args.ckpt_step)
    state = (read_state(commit).get("plugin_state") or {}) if commit else {}
    return dict(state.get(_STATE) or {})
