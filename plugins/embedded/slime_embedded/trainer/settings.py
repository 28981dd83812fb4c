"""`args` -> the embedded trainer's own settings, checked; the only place of the trainer that reads flags.

Called once by `EmbeddedTrainer`. What every trainer has is in `trainers.settings`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from slime_core.errors import ConfigError
from slime_core.models.config import ModelConfig
from slime_core.protocols import Args
from slime_core.trainers.settings import CommonSettings, Role, common_values


@dataclass(frozen=True)
class TrainerSettings(CommonSettings):
    """What the trainer needs to know besides model, optimizer and schedule.

    `compute_dtype` is what matrix products are computed in; parameters stay float32.
    """

    recompute: bool
    batch_invariant: bool
    """`--true-on-policy-mode`: log-probs are the embedded engine's bit for bit."""

    @classmethod
    def from_args(cls, args: Args, role: Role = "actor") -> TrainerSettings:
        """The settings of the actor's trainer or the critic's, of which all parameters are trained.

        Raises:
            ConfigError: A value that this trainer cannot honour.
        """
        granularity = args.recompute_granularity
        if granularity not in (None, "full"):
            raise ConfigError(f"--recompute-granularity {granularity}: the embedded trainer knows only 'full'")
        return cls(
            **common_values(args, role),
            recompute=granularity == "full" or args.recompute_activations,
            batch_invariant=args.true_on_policy_mode,
        )


def check_fits(settings: TrainerSettings, config: ModelConfig, role: Role) -> None:
    """Raise ConfigError for what this trainer does with its own decoders only, and the model is none."""
    if not config.images:
        return
    asked = {
        "--lora-rank": settings.lora is not None,
        "--true-on-policy-mode": settings.batch_invariant,
        "--recompute-granularity": settings.recompute,
        "a critic (--advantage-estimator ppo)": role == "critic",
    }
    for name in (name for name, wanted in asked.items() if wanted):
        raise ConfigError(
            f"--hf-checkpoint {settings.hf_checkpoint}: a {config.model_type} model takes images, and the embedded"
            f" trainer has no {name} for those; remove it"
        )


def main_memory() -> int:
    """Bytes, of the machine or of the limit of this process's control group."""
    machine, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="utf-8").strip() if limit.is_file() else ""
    return min(machine, int(text)) if text.isdigit() else machine
