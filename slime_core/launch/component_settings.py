"""What the run's components say about settings: which ones they act on, and what they find wrong with them.

`prepare` asks once, before anything starts. Two optional attributes of an engine's or trainer's class: `uses`, names of
the settings in `config.support.BY_COMPONENT` that it acts on, and the classmethod `check_settings(settings)`. What a
reader would get wrong: a class uses what its base classes use, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from slime_core.config import Settings
from slime_core.config.spec import flag_specs
from slime_core.config.support import OF_TRAINERS, check_component_support
from slime_core.errors import PluginError
from slime_core.launch.components import Components
from slime_core.launch.launchers import RAY

logger = logging.getLogger(__name__)

OF_ENGINE_ACTORS = frozenset({"rollout_max_engine_restarts", "use_fault_tolerance"})
"""Settings that the Ray launcher acts on for an engine that works in an actor (`cluster/comeback.py`)."""


def check_component_settings(settings: Settings, parts: Components) -> None:
    """Log warnings. Raises ConfigError for a setting nobody acts on, and for what a component refuses."""
    flags = [
        (part, name) for part, name in ((parts.engine, "rollout_engine"), (parts.trainer, "train_backend")) if part
    ]
    uses = {setting for part, name in flags for setting in _uses(part, settings.cite(name))}
    if parts.trainer is None:
        uses |= OF_TRAINERS
    if (
        settings.args.launcher == RAY
        and parts.engine is not None
        and not getattr(parts.engine, "runs_elsewhere", False)
    ):
        uses |= OF_ENGINE_ACTORS
    chosen = " and ".join(f"--{name.replace('_', '-')} {getattr(settings.args, name)}" for _, name in flags)
    warnings = check_component_support(settings.args, settings.origins, uses, chosen or f"slime {settings.command}")
    for part, _ in flags:
        check = getattr(part, "check_settings", None)
        warnings += check(settings) if check is not None else []
    for warning in warnings:
        logger.warning("%s", warning)


def uses_of(part: Any) -> frozenset[str]:
    """Settings of `BY_COMPONENT` that a component acts on, which `check_component_settings` has checked."""
    return frozenset(_uses(part, ""))


def _uses(part: Any, cited: str) -> Iterator[str]:
    """Settings that a component says it acts on. Raises PluginError for a name that is no setting."""
    for owner in getattr(part, "__mro__", (part,)):
        for setting in getattr(owner, "__dict__", {}).get("uses", ()):
            if setting not in flag_specs():
                raise PluginError(f"{cited}: `uses` of {owner.__name__} has {setting!r}, which is no setting")
            yield setting
