"""Check the settings against the run's components: which settings a component uses, and which it refuses.

`prepare` calls the check once, before anything starts. The traits of an engine, a trainer or a weight transport list
the settings of `config.support.BY_COMPONENT` that it `uses`. Its class may have two classmethods: `missing(args)`
returns the packages that are not installed and the command that installs them (empty if nothing is missing), and
`check_settings(settings)` returns warnings.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.config import Settings
from slime_core.config.backends import WITHOUT_FLAGS
from slime_core.config.spec import flag_specs
from slime_core.config.support import OF_TRAINERS, check_component_support
from slime_core.errors import ConfigError, PluginError
from slime_core.launch.components import Components
from slime_core.launch.launchers import launcher_traits
from slime_core.protocols import EngineTraits, TrainerTraits, TransportTraits, traits_of

logger = logging.getLogger(__name__)

_TRAITS: Mapping[str, type[Any]] = {
    "update_weight_transport": TransportTraits,
    "rollout_engine": EngineTraits,
    "train_backend": TrainerTraits,
}
"""Setting that names a component -> class of the component's traits."""

OF_ENGINE_ACTORS = frozenset({"rollout_max_engine_restarts", "use_fault_tolerance"})
"""Settings that a launcher applies to an engine process that it started (`LauncherTraits.restarts_engines`)."""


def check_component_settings(settings: Settings, parts: Components) -> None:
    """Log warnings. Raises ConfigError for a setting that no component uses or that a component refuses."""
    flags = _chosen(parts)
    _check_installed(settings, flags)
    warn_unsupported(settings, parts)
    _settle_weight_files(settings, parts.weight_transport)
    for part, _ in flags:
        check = getattr(part, "check_settings", None)
        for warning in check(settings) if check is not None else ():
            logger.warning("%s", warning)


def _settle_weight_files(settings: Settings, transport: Any) -> None:
    """Set the directory of a transport that writes files. Raises ConfigError."""
    args = settings.args
    if transport is None or not transport.traits.writes_files or args.update_weight_disk_dir is not None:
        return
    if args.run_dir is None:
        raise ConfigError(
            f"{settings.cite('update_weight_transport')} needs --update-weight-disk-dir DIR or --save DIR."
        )
    settings.derive("update_weight_disk_dir", os.path.join(args.run_dir, "weights"), "run_dir")


def warn_unsupported(settings: Settings, parts: Components) -> list[str]:
    """Log and return warnings about settings that no component uses. Raises ConfigError."""
    flags, uses = _chosen(parts), set[str]()
    for part, name in flags:
        acts_on = set(traits_of(part, _TRAITS[name]).uses)
        for unknown in sorted(acts_on - flag_specs().keys()):
            raise PluginError(f"{settings.cite(name)}: `uses` of its traits has {unknown!r}, which is no setting")
        uses |= acts_on
    if parts.trainer is None:
        uses |= OF_TRAINERS.keys()
    if (
        parts.engine is not None
        and not traits_of(parts.engine, EngineTraits).runs_elsewhere
        and launcher_traits(settings).restarts_engines
    ):
        uses |= OF_ENGINE_ACTORS
    chosen = " and ".join(f"--{name.replace('_', '-')} {getattr(settings.args, name)}" for _, name in flags)
    told = check_component_support(settings.args, settings.origins, uses, chosen or f"slime {settings.command}")
    for warning in told:
        logger.warning("%s", warning)
    return told


def _chosen(parts: Components) -> list[tuple[Any, str]]:
    """Return (class, setting that names it) of the transport, the engine and the trainer that the run has."""
    named = zip((parts.weight_transport, parts.engine, parts.trainer), _TRAITS)
    return [(part, name) for part, name in named if part]


def _check_installed(settings: Settings, flags: Sequence[tuple[Any, str]]) -> None:
    """Raise one ConfigError that lists all missing packages of the chosen components, with an alternative if any."""
    missing = {name: part.missing(settings.args) for part, name in flags if hasattr(part, "missing")}
    lacking = [f"{settings.cite(name)}: {text}" for name, text in missing.items() if text]
    if not lacking:
        return
    chosen = [flag_specs()[n].flag for n, text in missing.items() if text and settings.origins[n].kind == "auto"]
    way = " ".join(f"{flag} {WITHOUT_FLAGS}" for flag in chosen)
    raise ConfigError("\n".join(lacking) + (f"\nOr go on without: type {way}" if way else ""))
