"""Load settings, including the defaults of the chosen estimator (`AdvantageEstimator.defaults`).

Commands load their settings with this module. The configuration package does not use plugins, so it is passed a
function that does. The default estimator has no preset, because its defaults are the schema's; so only a run that names
another estimator loads its plugin (and torch) before the settings are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slime_core.config import Args, Origin, Settings
from slime_core.config.load import load_settings as load_without_preset
from slime_core.errors import PluginError

_COMMANDS = ("train", "rollout", "show")
"""Commands whose settings depend on the estimator."""


def load_settings(
    argv: Sequence[str],
    *,
    command: str = "train",
    env: Mapping[str, str] | None = None,
    files: bool = True,
    fetch: bool = True,
    arguments: Mapping[str, object] | None = None,
) -> Settings:
    """Load settings as `slime_core.config.load_settings`; the estimator's defaults rank below the user's values.

    Raises:
        ConfigError: A setting is unknown, malformed, unsupported or contradicts another.
        PluginError: The estimator cannot be found or loaded.
    """
    preset = _estimator_preset if command in _COMMANDS else None
    return load_without_preset(
        argv, command=command, env=env, preset=preset, files=files, fetch=fetch, arguments=arguments
    )


def _estimator_preset(args: Args, origins: Mapping[str, Origin]) -> tuple[Mapping[str, object], str]:
    """Return the defaults of the chosen estimator and their label for messages; both empty for the default one."""
    spec = args.advantage_estimator
    if spec == Args.model_fields["advantage_estimator"].default:
        return {}, ""
    from slime_core.plugins.discovery import search_as
    from slime_core.plugins.resolve import resolve

    search_as(args)
    origin = f"--advantage-estimator ({origins['advantage_estimator']})"
    brought = getattr(resolve("estimators", spec, origin=origin).obj, "defaults", {})
    if not isinstance(brought, Mapping):
        raise PluginError(f"{origin}: `defaults` of {spec!r} is {type(brought).__name__}; expected setting -> value")
    return brought, f"default of --advantage-estimator {spec}"
