"""`args` -> the embedded trainer's own settings, checked; the only module of the trainer that reads flags.

Called once by `EmbeddedTrainer`. Settings of every trainer are in `trainer.shared_settings`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from slime_core.errors import ConfigError
from slime_core.models.config import ModelConfig
from slime_core.protocols import Args
from slime_embedded.trainer.shared_settings import CommonSettings, Role, common_values


@dataclass(frozen=True)
class TrainerSettings(CommonSettings):
    """Settings of the trainer besides model, optimizer and schedule.

    `compute_dtype` is the dtype of matrix products; parameters stay float32.
    """

    model_impl: str
    """`--model-impl`: "auto", "slime" or "transformers"."""
    recompute: bool
    lora_unmerged: bool
    """`--lora-unmerged`: engines get the adapters instead of merged weights."""
    batch_invariant: bool
    """`--true-on-policy-mode`: log-probs equal the embedded engine's bit for bit."""
    adapters: tuple[str, ...] = ()
    """`--lora-adapters`: names of the adapters besides the shared one."""

    @classmethod
    def from_args(cls, args: Args, role: Role = "actor") -> TrainerSettings:
        """Return the settings of the trainer of the actor, or of the critic, whose parameters are all trained.

        Raises:
            ConfigError: This trainer does not support a value.
        """
        granularity = args.recompute_granularity
        if granularity not in (None, "full"):
            raise ConfigError(f"--recompute-granularity {granularity}: the embedded trainer knows only 'full'")
        return cls(
            **common_values(args, role),
            model_impl=args.model_impl,
            lora_unmerged=args.lora_unmerged,
            recompute=granularity == "full" or args.recompute_activations,
            batch_invariant=args.true_on_policy_mode,
            adapters=tuple(args.lora_adapters) if role == "actor" else (),
        )


def check_fits(args: Args, settings: TrainerSettings, config: ModelConfig, role: Role) -> None:
    """Raise ConfigError for features that need one of slime's own decoders, if transformers builds the model."""
    if config.build is None:
        return
    asked = {
        "--lora-rank": config.images and settings.lora is not None,
        "--lora-adapters": settings.adapters,
        "--true-on-policy-mode": settings.batch_invariant,
        "--recompute-granularity": config.images and settings.recompute,
        "--use-rollout-routing-replay": args.use_rollout_routing_replay,
        "--use-routing-replay": args.use_routing_replay,
        "a critic (--advantage-estimator ppo)": role == "critic",
    }
    for name in (name for name, wanted in asked.items() if wanted):
        raise ConfigError(
            f"--hf-checkpoint {settings.hf_checkpoint}: transformers builds this {config.model_type} model, for which"
            f" the embedded trainer has no {name}; remove it"
        )


def main_memory() -> int:
    """Return the bytes of memory of the machine, or the limit of this process's control group."""
    machine, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="utf-8").strip() if limit.is_file() else ""
    return min(machine, int(text)) if text.isdigit() else machine
