"""Settings that may change while a run goes on, and how a change takes effect.

A change takes effect at once where every part of the run that reads the setting lives in the loop's process; else the
run ends with a commit after its step, and resumes with the new value. Both give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from slime_core.errors import ConfigError, did_you_mean
from slime_core.launch.drive import RunParts
from slime_core.launch.roles import Trainers, role_args
from slime_core.protocols import Args


class Reader(Enum):
    """The part of a run that reads a setting."""

    LOOP = "loop"
    ROLLOUT = "rollout"
    LEARNER = "learner"
    """The losses and estimators, before each batch."""
    TRAINER = "trainer"
    """The trainer, which has a copy: `settings_changed(args)` replaces it."""
    REFERENCE = "reference"
    """Like the learner; from 0 a reference model has to be loaded, and the run resumes."""


CHANGES: Mapping[str, Reader] = {
    "lr": Reader.TRAINER,
    "min_lr": Reader.TRAINER,
    "critic_lr": Reader.TRAINER,
    "rollout_temperature": Reader.TRAINER,
    "rollout_top_p": Reader.ROLLOUT,
    "rollout_top_k": Reader.ROLLOUT,
    "plugins": Reader.ROLLOUT,
    "kl_coef": Reader.REFERENCE,
    "kl_loss_coef": Reader.REFERENCE,
    "entropy_coef": Reader.LEARNER,
    "eps_clip": Reader.LEARNER,
    "eps_clip_high": Reader.LEARNER,
    "eval_interval": Reader.LOOP,
    "save_interval": Reader.LOOP,
}
"""Setting that may change -> the part that reads it."""
SCHEDULE = {"lr", "min_lr", "critic_lr"}
"""Settings of the learning-rate schedule, which a commit stores."""
OPTIONS = {"stratified": ("shares",)}
"""Plugin -> its options that may change with `plugins`: those that it reads before each rollout."""


def check_change(values: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting, or a plugin's option, that may not change; it names those that may.

    Args:
        values: Setting -> new value.
        before: The plugin options of the run.
    """
    for name in values:
        if name not in CHANGES:
            hint = did_you_mean(name, CHANGES)
            raise ConfigError(
                f"change({name}=...): may not change during a run.{hint} These may: {', '.join(CHANGES)}. For another,"
                " leave the loop and type Trainer(..., save=trainer.run.path, resume=True)"
            )
    after = values.get("plugins", before)
    for plugin in (before or {}).keys() | (after or {}).keys():
        old, new = (before or {}).get(plugin) or {}, (after or {}).get(plugin) or {}
        for option in old.keys() | new.keys():
            if old.get(option) != new.get(option) and option not in OPTIONS.get(plugin, ()):
                may = ", ".join(f"{known}.{one}" for known, options in OPTIONS.items() for one in options)
                raise ConfigError(f"change(plugins=...): {plugin}.{option} may not change during a run; {may} may")


def change(args: Args, parts: RunParts, values: Mapping[str, Any]) -> bool:
    """Change settings of the run in progress; return False, and change nothing, if it has to resume for that."""
    trainers: Any = parts.trainers
    local = [one for one in (trainers.actor, trainers.critic) if one] if isinstance(trainers, Trainers) else []
    readers = {CHANGES[name] for name in values}
    from_zero = any(CHANGES[name] is Reader.REFERENCE and not getattr(args, name) for name in values)
    able = all(hasattr(one, "settings_changed") for one in local)
    if readers != {Reader.LOOP} and (not local or from_zero or (Reader.TRAINER in readers and not able)):
        return False
    for name, value in values.items():
        setattr(args, name, value)
    if Reader.TRAINER in readers:
        trainers.actor.settings_changed(role_args(args, "actor"))
        if trainers.critic is not None:
            trainers.critic.settings_changed(role_args(args, "critic"))
    rewards = getattr(getattr(parts.stage, "parts", None), "rewards", None)
    if rewards is not None:
        rewards.settings_changed()
    return True
