"""Kind and name -> `ComponentRef`, a component that is known but not imported.

The hook `slime_register_components` fills the registry; discovery, tests and notebooks implement this hook. If two
distributions offer the same name, both are kept. Only selecting that name is an error, so an unused clash does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_core.distributions import BUNDLE, AllowList, installed, is_own, normalized
from slime_core.errors import PluginConflictError, PluginNotFoundError, did_you_mean
from slime_core.plugins.kinds import HOOK_GROUP, KINDS, kind_of

NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]*")
"""Pattern of component names: without '.', ':' and '/', which keeps the grammar of specs unambiguous."""

RANK_EXPLICIT, RANK_INSTALLED, RANK_CHECKOUT = 0, 1, 2
"""Order in which a copy of a distribution is chosen: `--plugin-dir`, installed, the checkout that slime runs from."""


def source_hash(file: Path, distribution: str = "") -> str:
    """Return the SHA-256 of a component's source: of its module, or of all modules of a plugin's package.

    For a user's file, only the file is hashed: other files next to it are unrelated. slime's own packages hold many
    components: a component there is its module, or the folder of its `__init__.py`.
    """
    import hashlib  # not loaded to list names

    digest = hashlib.sha256(file.read_bytes())
    top, own = file.parent, is_own(distribution)
    while not own and (top.parent / "__init__.py").is_file():
        top = top.parent
    alone = own and file.name != "__init__.py"
    if distribution and not alone and (top / "__init__.py").is_file():
        for other in sorted(top.rglob("*.py")):
            digest.update(other.relative_to(top).as_posix().encode() + b"\0" + other.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class ComponentRef:
    """The origin of a component. All fields except `source_file` are known without an import."""

    kind: str
    """Plural name of the kind."""
    name: str
    """The registered name, or the spec that the component was resolved from."""
    target: str
    """`module:attr`, or the absolute `file.py:attr`."""
    distribution: str = ""
    """Empty for a file or an import path that no distribution registered."""
    version: str = ""
    requires: tuple[str, ...] = ()
    """The distribution's own requirements, as in `Requires-Dist`."""
    folder: Path | None = None
    """The plugin's source folder when it was found in a directory."""
    rank: int = RANK_INSTALLED
    source_file: Path | None = None
    """The loaded module's file."""
    registered: Any = field(default=None, compare=False, repr=False)
    """The object itself, if it was registered by code and not by metadata."""
    prefix: str = ""
    """Prefixes in the requested name that wrap the component, such as `boxed_`."""

    def provenance(self) -> dict[str, object]:
        """Return name, target, distribution, version and source hash (once loaded), for the run and checkpoints."""
        file = self.source_file
        return {
            "kind": self.kind,
            "name": self.prefix + self.name,
            "target": self.target,
            "distribution": self.distribution,
            "version": self.version,
            "source_file": str(file) if file else None,
            "sha256": source_hash(file, self.distribution) if file and file.is_file() else None,
        }

    @property
    def origin(self) -> str:
        """Return distribution and version, or the folder or file, for tables and messages."""
        if self.distribution:
            return f"{self.distribution} {self.version}".strip()
        return str(self.folder or self.source_file or "import path")

    @property
    def install_hint(self) -> str:
        """Return the command that reinstalls the distribution with its requirements."""
        if self.folder:
            return f"pip install -e {self.folder}"
        if is_own(self.distribution):
            return f"pip install --upgrade {self.distribution}"
        # On the package index, the name may belong to another project; only the user knows the source of this one.
        return f"install {self.distribution} again, from where it came"

    @property
    def label(self) -> str:
        """Return the name of the component in messages: `reward 'math' (slime-reward-math 0.1.0)`."""
        singular = "hook plugin" if self.kind == HOOK_GROUP else kind_of(self.kind).singular.replace("_", " ")
        name = self.prefix + self.name
        return f"{singular} {name!r} ({self.origin})" if self.distribution else f"{singular} {name!r}"


@dataclass(frozen=True)
class Resolved:
    """A loaded component or hook module."""

    obj: Any
    """The function, class or instance; a hook plugin's module or object."""
    ref: ComponentRef
    """Origin of the component; `source_file` is set."""
    kind: str = ""
    """Argument of `resolve`: the name of a kind, or of a flag that takes a function."""
    spec: str = ""
    origin: str = ""


@dataclass(frozen=True)
class Problem:
    """An entry that discovery could not use. `slime plugins list --check` reports it; it stops no command."""

    where: str
    message: str


class Registry:
    """All known components, and the hook modules, by kind and name."""

    def __init__(self, allow: AllowList = AllowList(None)) -> None:  # noqa: B008  frozen
        self._refs: dict[tuple[str, str], dict[str, ComponentRef]] = {}
        self.allow = allow
        self.problems: list[Problem] = []
        self.left_out: list[ComponentRef] = []
        """Components found but not allowed: treated as not installed, except for the message when one is selected."""
        self.shadowed: list[tuple[ComponentRef, ComponentRef]] = []
        """Pairs (copy in use, other copy) of components of which a distribution has two copies."""

    def add(self, ref: ComponentRef) -> None:
        """Add a component; of two copies from the same distribution or with the same target, keep the better-ranked.

        A folder of the checkout and the bundle built from the folder offer the same targets.
        """
        if not self.allow.allows(ref.name, ref.distribution):
            self.left_out.append(ref)
            return
        if not NAME_PATTERN.fullmatch(ref.name):
            self.problems.append(
                Problem(ref.origin, f"{ref.kind} name {ref.name!r} is not allowed; names match [a-z][a-z0-9_]*")
            )
            return
        offers = self._refs.setdefault((ref.kind, ref.name), {})
        key = next((key for key, other in offers.items() if other.target == ref.target), normalized(ref.distribution))
        known = offers.get(key)
        if known is None or ref.rank < known.rank:
            offers[key] = ref
        if known is not None and known.registered is None:
            used = offers[key]
            self.shadowed.append((used, ref if used is known else known))

    def add_object(self, kind: str, name: str, obj: object, *, distribution: str = "") -> None:
        """Register an object by code, from a hook module, a test or a notebook.

        Raises:
            PluginConflictError: The same distribution registered another object under that name.
            PluginNotFoundError: The kind does not exist.
            ValueError: The name is not allowed.
        """
        plural = kind_of(kind).registered
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(f"{plural} name {name!r} is not allowed; names match [a-z][a-z0-9_]*")
        module, attr = getattr(obj, "__module__", ""), getattr(obj, "__qualname__", type(obj).__qualname__)
        known = self._refs.get((plural, name), {}).get(normalized(distribution))
        if known is not None and known.registered is not obj:
            raise PluginConflictError(
                f"{plural} plugin {name!r} is registered twice: {known.target} and {module}:{attr}"
            )
        self.add(ComponentRef(plural, name, f"{module}:{attr}", distribution=distribution, registered=obj))

    def not_found(self) -> list[str]:
        """Return the words of SLIME_PLUGINS that match no known component or distribution."""
        return self.allow.unknown((ref.name, ref.distribution) for ref in [*self, *self.left_out])

    def offers(self, kind: str, name: str) -> list[ComponentRef]:
        """Return every distribution's component of that name, sorted by distribution; several are a conflict."""
        found = self._refs.get((kind, name), {})
        return [found[key] for key in sorted(found)]

    def names(self, kind: str) -> list[str]:
        """Return the sorted names of a kind."""
        return sorted(name for k, name in self._refs if k == kind)

    def __iter__(self) -> Iterator[ComponentRef]:
        """Yield all refs, conflicting ones included, by kind and name; hook modules last."""
        order = [*KINDS, HOOK_GROUP]
        for kind, name in sorted(self._refs, key=lambda key: (order.index(key[0]), key[1])):
            yield from self.offers(kind, name)

    def get(self, kind: str, name: str, *, distribution: str = "") -> ComponentRef:
        """Return the component of that name, from `distribution` if it is given.

        Raises:
            PluginNotFoundError: No distribution offers the name; the message suggests and lists names.
            PluginConflictError: Two distributions offer the name and `distribution` does not choose between them.
        """
        offers = self.offers(kind, name)
        if distribution:
            offers = [ref for ref in offers if normalized(ref.distribution) == normalized(distribution)]
        if not offers:
            raise PluginNotFoundError(self._left_out(kind, name) or self._unknown(kind, name, distribution))
        if len(offers) > 1:
            who = " and ".join(f"{ref.origin} ({ref.target})" for ref in offers)
            choices = " or ".join(f"'{ref.distribution or '?'}:{name}'" for ref in offers)
            raise PluginConflictError(f"{kind} plugin {name!r} is offered by {who}. Say which: {choices}")
        return offers[0]

    def _left_out(self, kind: str, name: str) -> str:
        """Return the message for an installed component that is not allowed; empty if there is no such component."""
        ref = next((ref for ref in self.left_out if (ref.kind, ref.name) == (kind, name)), None)
        if ref is None:
            return ""
        return (
            f"{ref.label} is installed, but left out by {self.allow.set_by}. To use it: {self.allow.way_in(ref.name)}"
        )

    def _unknown(self, kind: str, name: str, distribution: str) -> str:
        names = self.names(kind)
        who = f" from {distribution!r}" if distribution else ""
        parts = [f"no {'hook' if kind == HOOK_GROUP else kind} plugin {name!r}{who}."]
        if distribution:
            parts += [f"{ref.distribution} offers it." for ref in self.offers(kind, name)]
        elif meant := did_you_mean(name, names, cutoff=0.6, form="{!r}"):
            parts.append(meant.lstrip())
        elif kind in KINDS:
            parts.append("One of yours has its path: FILE.py:NAME.")
        if kind in KINDS and installed(BUNDLE) is None:
            parts.append(f"slime's own come with: pip install {BUNDLE}.")
        parts.append(f"Installed: {', '.join(names) or 'none'}")
        parts += [f"({self.allow.set_by} is in force)"] if self.allow.set_by else []
        parts += [f"(not usable: {p.where}: {p.message})" for p in self.problems]
        return " ".join(parts)
