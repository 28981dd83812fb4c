"""Names of components in the commands: `KIND/NAME` in arguments, cells in tables."""

from __future__ import annotations

from pathlib import Path

from slime_core.errors import PluginNotFoundError
from slime_core.plugins.kinds import HOOK_GROUP, kind_of
from slime_core.plugins.manager import current_registry
from slime_core.plugins.registry import ComponentRef

HOOK_WORDS = ("hooks", "hook", "plugins", "plugin", HOOK_GROUP)
"""Words that name the hook plugins, which have no kind."""


def kind_key(word: str) -> str:
    """Return the registry's key of a kind, singular or plural, or of the hook plugins. Raises PluginNotFoundError."""
    return HOOK_GROUP if word in HOOK_WORDS else kind_of(word).name


def registered_kind(word: str) -> str:
    """Return the kind that names are registered under: like `kind_key`, but one kind for the functions of all flags."""
    return HOOK_GROUP if word in HOOK_WORDS else kind_of(word).registered


def kind_word(ref: ComponentRef) -> str:
    """Return the kind as tables show it."""
    return "hooks" if ref.kind == HOOK_GROUP else ref.kind


def origin(ref: ComponentRef) -> str:
    """Return the distribution, the version, and the folder if the plugin is used from a folder."""
    if ref.folder is None:
        return ref.origin
    folder = ref.folder.relative_to(Path.cwd()) if ref.folder.is_relative_to(Path.cwd()) else ref.folder
    return f"{ref.origin} (dir {folder})"


def split(component: str, command: str) -> tuple[str, str]:
    """Split `rewards/math` or `rewards:./my_rm.py:reward` at the first separator into kind and spec.

    A name alone is enough if components of only one kind have it.

    Raises:
        PluginNotFoundError: No kind or several kinds have the name, or there is no such kind or no such folder.
    """
    if component.startswith((".", "/", "~")):
        needed = "a path needs its kind before it, as in rewards:my_rm.py"
        what = needed if Path(component).exists() else "no such folder"
        raise PluginNotFoundError(f"{command} {component}: {what}")
    position = next((i for i, character in enumerate(component) if character in "/:"), -1)
    if position < 0:
        kinds = sorted({ref.kind for ref in current_registry() if ref.name == component})
        if len(kinds) == 1:
            return kinds[0], component
        found = f"several are called so: {', '.join(f'{kind}/{component}' for kind in kinds)}; " if kinds else ""
        raise PluginNotFoundError(f"{command} {component!r}: {found}write KIND/NAME or KIND:SPEC, e.g. rewards/math")
    return kind_key(component[:position]), component[position + 1 :]
