"""`--train-backend auto` and `--rollout-engine auto` -> the name of a backend, by what else was given.

Called by `load_settings` once everything is typed, so nothing behind it ever sees "auto". Whose flags choose what is
said by their owners (`ForeignFlags.chooses`, `chosen_by`); no name of a backend but the one for "nothing" is in here.
The machine is not looked at. The same command means the same everywhere, and where the backend that it means is
missing, `launch.component_settings` says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from slime_core.config.foreign import ForeignFlags, find_foreign
from slime_core.config.origins import Entry, Origin
from slime_core.config.settings import Settings
from slime_core.config.spec import flag_specs
from slime_core.errors import ConfigError

AUTO = "auto"
WITHOUT_FLAGS = "embedded"
"""What "auto" is where nothing chooses; needs nothing that slime does not bring."""
BACKENDS = ("train_backend", "rollout_engine")


def choose_backends(settings: Settings, given: Mapping[str, Entry], owners: Sequence[ForeignFlags]) -> None:
    """Replace "auto" in both settings; the origin says because of what.

    Args:
        settings: Typed, before any rule.
        given: Other programs' flags, by attribute.
        owners: Whose flags they may be.

    Raises:
        ConfigError: Flags of several backends are given.
    """
    for name in BACKENDS:
        if getattr(settings.args, name) != AUTO:
            continue
        chosen = dict(_by_flags(name, given, owners)) or dict(_by_settings(name, settings, owners))
        if len(chosen) > 1:
            told = " and ".join(f"{value} (because of {why})" for value, why in chosen.items())
            flag = flag_specs()[name].flag
            raise ConfigError(f"{flag} auto: {told} are both asked for; type {flag} NAME, or remove the other's flags.")
        value, why = next(iter(chosen.items()), (WITHOUT_FLAGS, ""))
        setattr(settings.args, name, value)
        if why or settings.is_given(name):
            settings.origins[name] = Origin("auto", f"because of {why}" if why else "")


def _by_flags(name: str, given: Mapping[str, Entry], owners: Sequence[ForeignFlags]) -> Iterator[tuple[str, str]]:
    """(Backend, flag) for another program's flags, the first given one last."""
    for attribute, entry in reversed([*given.items()]):
        owner = find_foreign(owners, attribute)
        # `--model` names the model for every trainer.
        if owner is None or entry.origin.kind == "preset" or entry.value is None:
            continue
        if owner.chooses == name and owner.used_by:
            yield owner.used_by[0], entry.named or "--" + attribute.replace("_", "-")


def _by_settings(name: str, settings: Settings, owners: Sequence[ForeignFlags]) -> Iterator[tuple[str, str]]:
    """(Backend, flag) for slime's own settings that only one backend can mean."""
    for owner in owners:
        if owner.chooses != name or not owner.used_by:
            continue
        for together in owner.chosen_by:
            if all(_is_asked(settings, n) for n in together):
                yield owner.used_by[0], " and ".join(_named(settings, n) for n in together)
                break


def _is_asked(settings: Settings, name: str) -> bool:
    """Whether somebody asks for it; 0 GPUs for inference are a wish, too: routers alone."""
    value = getattr(settings.args, name)
    return settings.is_given(name) and value is not None and value is not False


def _named(settings: Settings, name: str) -> str:
    origin = settings.origins[name]
    return flag_specs()[name].flag + ("" if origin.kind == "flag" else f" ({origin})")
