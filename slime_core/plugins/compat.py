"""Does a plugin's distribution accept the slime that is running?

A plugin author declares nothing for this: the distribution's own requirement on one of `_SLIME` is tested.
Requirements on anything else are not parsed here, since every command does this at its start (`missing_requirements`
reads them all).
"""

from __future__ import annotations

import re

import slime_core
from slime_core.distributions import BUNDLE, CORE, normalized
from slime_core.errors import PluginIncompatibleError
from slime_core.plugins.allow import install_hint
from slime_core.plugins.registry import ComponentRef

_SLIME = (CORE, BUNDLE)
"""They have one version."""
_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:[\[(<>=!~;@]|$)")
"""What a requirement begins with (PEP 508)."""


def check_compatible(ref: ComponentRef, *, running: str | None = None, origin: str = "") -> None:
    """Raise PluginIncompatibleError when `ref`'s distribution requires another slime-rl than `running`.

    `origin` is what asked for the plugin, for the message. The core's own components fit.
    """
    if normalized(ref.distribution) == CORE:
        return
    ours = [text for text in ref.requires if _name(text) in (*_SLIME, "")]
    if not ours:
        return
    from packaging.requirements import InvalidRequirement, Requirement

    version = running or slime_core.__version__
    asked = f"{origin}: " if origin else ""
    for text in ours:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise PluginIncompatibleError(
                f"{asked}{ref.label} has a malformed requirement {text!r}: {str(error).splitlines()[0]}. {_remedy(ref)}"
            ) from error
        if normalized(requirement.name) not in _SLIME:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            raise PluginIncompatibleError(
                f"{asked}{ref.label} needs {requirement.name}{requirement.specifier}, but {requirement.name}"
                f" {version} is running. {_remedy(ref)}, or: pip install '{requirement.name}{requirement.specifier}'"
            )


def _name(requirement: str) -> str:
    """Whom a requirement is on, normalized; empty where it does not begin with a name."""
    found = _NAME.match(requirement)
    return normalized(found[1]) if found else ""


def _remedy(ref: ComponentRef) -> str:
    """What to do for another version of the plugin."""
    return f"Edit {ref.folder / 'pyproject.toml'}" if ref.folder else f"To mend it: {install_hint(ref)}"


def missing_requirements(ref: ComponentRef) -> list[tuple[str, str]]:
    """What the plugin's distribution requires, other than slime, and this environment lacks: (requirement, found).

    `found` is the installed version that does not do, or empty.
    """
    from importlib import metadata

    from packaging.requirements import InvalidRequirement, Requirement

    missing = []
    for text in ref.requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if normalized(requirement.name) in _SLIME:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            found = ""
        if not found or not requirement.specifier.contains(found, prereleases=True):
            missing.append((f"{requirement.name}{requirement.specifier}", found))
    return missing
