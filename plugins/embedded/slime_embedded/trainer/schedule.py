"""Optimizer steps taken -> learning rate, by Megatron-LM's rules.

The optimizer asks before each step, with the number of steps already taken: the first step of a warm-up is
therefore taken at `lr_warmup_init`, as in Megatron. Skipped steps do not advance the schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from slime_core.errors import ConfigError
from slime_core.protocols import Args


@dataclass(frozen=True)
class LearningRateSchedule:
    """Warm-up to `lr`, then decay to `min_lr` by `style`; counts are optimizer steps."""

    lr: float
    min_lr: float = 0.0
    style: str = "constant"
    warmup_steps: int = 0
    warmup_init: float = 0.0
    decay_steps: int = 0
    """Step at which `min_lr` is reached, warm-up included; 0: never, with "inverse-square-root"."""
    wsd_decay_steps: int = 0
    """Length of the final decay of warmup-stable-decay."""
    wsd_style: str = "exponential"

    @classmethod
    def from_args(cls, args: Args, *, critic: bool = False) -> LearningRateSchedule:
        """Read Megatron's `--lr*` flags; the critic has its own `--critic-lr` and the same shape.

        Raises:
            ConfigError: They contradict each other.
        """

        style, fraction, warmup = args.lr_decay_style, args.lr_warmup_fraction, args.lr_warmup_iters
        decay = args.lr_decay_iters
        needs_total = fraction is not None or style not in ("constant", "inverse-square-root")
        if decay is None and needs_total:
            decay = _total_steps(args, critic)
        if fraction is not None:
            if warmup:
                raise ConfigError(
                    f"--lr-warmup-fraction {fraction} and --lr-warmup-iters {warmup}: give one of the two"
                )
            warmup = int(fraction * (decay or 0))
        if style == "WSD" and not args.lr_wsd_decay_iters:
            raise ConfigError("--lr-decay-style WSD needs --lr-wsd-decay-iters: steps of the final decay")
        schedule = cls(
            lr=args.critic_lr if critic and args.critic_lr is not None else args.lr,
            min_lr=args.min_lr,
            style=style,
            warmup_steps=warmup,
            warmup_init=args.lr_warmup_init,
            decay_steps=decay or 0,
            wsd_decay_steps=args.lr_wsd_decay_iters or 0,
            wsd_style=args.lr_wsd_decay_style,
        )
        schedule._check()
        return schedule

    def _check(self) -> None:
        if self.lr < 0 or not 0 <= self.min_lr <= max(self.lr, 0.0):
            raise ConfigError(f"--lr {self.lr} --min-lr {self.min_lr}: 0 <= min-lr <= lr is needed")
        if self.warmup_init > self.lr:
            raise ConfigError(f"--lr-warmup-init {self.warmup_init} is above --lr {self.lr}")
        if self._decays_by_step and not self.warmup_steps < self.decay_steps:
            raise ConfigError(
                f"--lr-decay-style {self.style}: {self.warmup_steps} warm-up steps leave nothing of the"
                f" {self.decay_steps} steps to decay over; lower --lr-warmup-iters or set --lr-decay-iters"
            )

    @property
    def _decays_by_step(self) -> bool:
        return self.style in ("linear", "cosine", "WSD")

    def at(self, steps: int) -> float:
        """The learning rate of the step taken after `steps` others."""
        if self.warmup_steps and steps <= self.warmup_steps:
            return self.warmup_init + (self.lr - self.warmup_init) * steps / self.warmup_steps
        if self.style == "constant":
            return self.lr
        if steps > self.decay_steps and (self.decay_steps or self._decays_by_step):
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup_steps, 1) / max(steps, 1)))
        return self.min_lr + (self.lr - self.min_lr) * self._coefficient(steps)

    def _coefficient(self, steps: int) -> float:
        """Share of `lr - min_lr` left, from 1 to 0."""
        if self.style == "WSD":
            done = (steps - (self.decay_steps - self.wsd_decay_steps)) / self.wsd_decay_steps
            return 1.0 if done <= 0 else _wsd_coefficient(self.wsd_style, done)
        done = (steps - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return 1.0 - done if self.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)

    def facts(self) -> dict[str, Any]:
        """The settings that change a learning rate to come; a checkpoint's must equal this run's."""
        facts: dict[str, Any] = {"lr": self.lr, "style": self.style, "warmup_steps": self.warmup_steps}
        if self.warmup_steps:
            facts["warmup_init"] = self.warmup_init
        if self.style != "constant":
            facts["min_lr"] = self.min_lr
        if self._decays_by_step or (self.style == "inverse-square-root" and self.decay_steps):
            facts["decay_steps"] = self.decay_steps
        if self.style == "WSD":
            facts |= {"wsd_decay_steps": self.wsd_decay_steps, "wsd_style": self.wsd_style}
        return facts


def _wsd_coefficient(style: str, done: float) -> float:
    if style == "linear":
        return 1.0 - done
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * done) + 1.0)
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(done)
    return 2.0 * math.pow(0.5, done) - 1.0


def _total_steps(args: Args, critic: bool) -> int:
    """Optimizer steps of the whole run: rollouts x samples per rollout / samples per step.

    The actor takes none in the rollouts at the start that train the critic only.
    """
    factors = ("num_rollout", "rollout_batch_size", "n_samples_per_prompt", "global_batch_size")
    missing = [name for name in factors if not getattr(args, name)]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ConfigError(f"--lr-decay-iters is needed: without {flags} the number of steps is unknown")
    rollouts = args.num_rollout if critic else args.num_rollout - args.num_critic_only_steps
    return int(rollouts * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)
