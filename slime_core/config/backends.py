"""Replace `--train-backend auto` and `--rollout-engine auto` by the name of a backend, based on the other settings.

`load_settings` calls this module once all values are typed, so later code never sees "auto". The owners of flags
declare which backend their flags choose (`ForeignFlags.chooses`, `chosen_by`); this module names only the default
backend. The choice does not depend on the machine: the same command selects the same backend everywhere.
`launch.checks` reports a chosen backend that is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from slime_core.config.foreign import ForeignFlags, find_foreign
from slime_core.config.settings import Entry, Origin, Settings
from slime_core.config.spec import flag_specs
from slime_core.errors import ConfigError

AUTO = "auto"
WITHOUT_FLAGS = "embedded"
"""Backend that "auto" selects by default; it needs no package besides slime itself."""
BACKENDS = ("train_backend", "rollout_engine")


def choose_backends(settings: Settings, given: Mapping[str, Entry], owners: Sequence[ForeignFlags]) -> None:
    """Replace "auto" in both settings; the origin of each records the reason.

    Args:
        settings: Typed settings, before any rule is applied.
        given: Other programs' flags, by attribute.
        owners: The possible owners of those flags.

    Raises:
        ConfigError: Flags of several backends were given.
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
    """Yield (backend, flag) for foreign flags, in reverse order given."""
    for attribute, entry in reversed([*given.items()]):
        owner = find_foreign(owners, attribute)
        # `--model` names the model for every trainer.
        if owner is None or entry.origin.kind == "preset" or entry.value is None:
            continue
        if owner.chooses == name and owner.used_by:
            yield owner.used_by[0], entry.named or "--" + attribute.replace("_", "-")


def _by_settings(name: str, settings: Settings, owners: Sequence[ForeignFlags]) -> Iterator[tuple[str, str]]:
    """Yield (backend, flags) for slime's own settings that only one backend supports."""
    for owner in owners:
        if owner.chooses != name or not owner.used_by:
            continue
        for together in owner.chosen_by:
            if all(_is_asked(settings, n) for n in together):
                yield owner.used_by[0], " and ".join(_named(settings, n) for n in together)
                break


def _is_asked(settings: Settings, name: str) -> bool:
    """Return True if the user enabled the setting; 0 GPUs for inference count, since they mean routers alone."""
    value = getattr(settings.args, name)
    return settings.is_given(name) and value is not None and value is not False


def _named(settings: Settings, name: str) -> str:
    origin = settings.origins[name]
    return flag_specs()[name].flag + ("" if origin.kind == "flag" else f" ({origin})")
