"""How the commands spell components: `KIND/NAME` in, table cells out."""

from __future__ import annotations

from pathlib import Path

from slime_core.errors import PluginNotFoundError
from slime_core.plugins.kinds import HOOK_GROUP, kind_of
from slime_core.plugins.manager import current_registry
from slime_core.plugins.registry import ComponentRef

HOOK_WORDS = ("hooks", "hook", "plugins", "plugin", HOOK_GROUP)
"""What a user may write for the hook plugins, which are of no kind."""


def kind_key(word: str) -> str:
    """The registry's key of a kind, singular or plural, or of the hook plugins. Raises PluginNotFoundError."""
    return HOOK_GROUP if word in HOOK_WORDS else kind_of(word).name


def registered_kind(word: str) -> str:
    """As `kind_key`, but what names are registered under: one kind for the functions of all flags."""
    return HOOK_GROUP if word in HOOK_WORDS else kind_of(word).registered


def kind_word(ref: ComponentRef) -> str:
    """The kind as tables show it."""
    return "hooks" if ref.kind == HOOK_GROUP else ref.kind


def origin(ref: ComponentRef) -> str:
    """Distribution, version, and the folder when it is used from one."""
    if ref.folder is None:
        return ref.origin
    folder = ref.folder.relative_to(Path.cwd()) if ref.folder.is_relative_to(Path.cwd()) else ref.folder
    return f"{ref.origin} (dir {folder})"


def split(component: str, command: str) -> tuple[str, str]:
    """`rewards/math` and `rewards:./my_rm.py:reward` -> kind, spec; the first separator counts.

    A name alone will do where components of one kind have it.

    Raises:
        PluginNotFoundError: Several kinds have the name or none has, there is no such kind or no such folder.
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
