"""Choose the launcher of a run: `--launcher NAME`, a component of kind `launchers`, or by settings and environment.

    --launcher auto   the launcher one of whose settings is given, such as --ray-address
                      inline in processes that torchrun started
                      the launcher one of whose environment variables is set
                      inline otherwise

Called by `slime_core.launch.run`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from slime_core.config import Settings
from slime_core.config.spec import flag_specs
from slime_core.errors import ConfigError, PluginError, PluginSignatureError
from slime_core.plugins.discovery import search_as
from slime_core.plugins.manager import current_registry
from slime_core.plugins.resolve import absolute_spec, resolve
from slime_core.plugins.signatures import construct
from slime_core.protocols import Args, LauncherTraits, traits_of

if TYPE_CHECKING:
    from slime_core.protocols.launcher import Launcher

logger = logging.getLogger(__name__)

AUTO, INLINE = "auto", "inline"
KIND = "launchers"
SETTINGS = ("ray_address",)
"""Settings that have no effect with a launcher unless its traits name them."""


def settle_launcher(settings: Settings) -> Launcher:
    """Return the run's launcher and write its name to `args.launcher`.

    Raises:
        ConfigError: A requirement of the launcher is not installed, or the settings contradict each other.
        PluginError: The launcher cannot be found or loaded.
    """
    args = settings.args
    search_as(args)
    by_torchrun = "WORLD_SIZE" in os.environ
    if args.launcher == AUTO:
        chosen, why = _guess(args, _all(), by_torchrun)
        settings.derive("launcher", chosen, why)
    args.launcher = absolute_spec(args.launcher)
    cited = settings.cite("launcher")
    launcher = load(args.launcher, cited)
    traits = launcher.traits
    if traits.spans_nodes and by_torchrun:
        raise ConfigError(
            f"{cited}: torchrun started this process (WORLD_SIZE is set), and this launcher starts the trainer's"
            f" processes itself; leave torchrun out, or type --launcher {INLINE}"
        )
    if lacking := launcher.missing(args):
        raise ConfigError(f"{cited}: {lacking}")
    if args.max_trainer_restarts and not traits.restarts_trainer:
        able = [name for name, other in _all().items() if other.traits.restarts_trainer]
        others = f", --launcher {' or '.join(able)} can" if able else ""
        raise ConfigError(
            f"{settings.cite('max_trainer_restarts')}: {cited} cannot restart the trainer{others}. Without, start the"
            " command again with --load, which goes on from the last commit"
        )
    for name in SETTINGS:
        if getattr(args, name) and name not in traits.settings:
            raise ConfigError(f"{settings.cite(name)} contradicts {cited}; remove one")
    return launcher


def launcher_traits(settings: Settings) -> LauncherTraits:
    """Return the traits of the run's launcher, or of the inline launcher if none is chosen yet, as in `slime check`.

    Raises:
        PluginError: The launcher cannot be found or loaded.
    """
    spec = settings.args.launcher
    return load(INLINE if spec == AUTO else spec, settings.cite("launcher")).traits


def _all() -> Mapping[str, Launcher]:
    """Return every launcher that can be loaded, by name. Logs a warning for each launcher that cannot."""
    found = {}
    for name in current_registry().names(KIND):
        try:
            found[name] = load(name, "")
        except PluginError as error:
            logger.warning("--launcher %s does without: %s", AUTO, error)
    return found


def load(spec: str, origin: str) -> Launcher:
    """Load and build the launcher that `spec` names.

    Raises:
        PluginError: The launcher cannot be found, loaded or built, or declares no traits.
    """
    resolved = resolve(KIND, spec, origin=origin)
    launcher: Launcher = construct(resolved.obj, None)
    for name in traits_of(launcher, LauncherTraits, resolved.ref.label).settings:
        if name not in flag_specs():
            raise PluginSignatureError(f"{resolved.ref.label}: `traits.settings` has {name!r}, which is no setting")
    return launcher


def _guess(args: Args, known: Mapping[str, Launcher], by_torchrun: bool) -> tuple[str, str]:
    """Return the launcher for `auto` and the reason. Raises ConfigError if two launchers apply."""
    claims = {
        name: flag_specs()[setting].flag
        for name, each in known.items()
        for setting in each.traits.settings
        if getattr(args, setting)
    }
    if not claims and by_torchrun:
        return INLINE, "started by torchrun"
    claims = claims or {
        name: f"environment variable {variable}"
        for name, each in known.items()
        for variable in reversed(each.traits.variables)
        if variable in os.environ
    }
    if len(claims) > 1:
        shown = " and ".join(f"{name} ({why})" for name, why in claims.items())
        raise ConfigError(f"--launcher {AUTO}: both {shown} are meant; type --launcher NAME")
    return next(iter(claims.items()), (INLINE, "nothing names another"))
