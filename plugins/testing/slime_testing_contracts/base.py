"""The base class of all contract suites: the component under test, its settings, and a guard on the suite itself.

`suite_of` finds the suite of a kind by entry point, for slime's own and third-party suites.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import pytest

from slime_core.config.schema import Args
from slime_core.errors import PluginConflictError, SlimeError
from slime_core.plugins.discovery import CONTRACTS_GROUP
from slime_core.plugins.kinds import HOOK_GROUP
from slime_core.plugins.manager import current_registry
from slime_core.plugins.options import check_plugin_options, options_model
from slime_core.plugins.registry import Resolved
from slime_core.plugins.resolve import resolve


def only_where(holds: Callable[[Any], bool]) -> pytest.MarkDecorator:
    """Mark a test for some components of a kind only: `holds(suite instance)` decides when tests are collected.

    If `holds` raises, for example for a component that does not load, the test is kept.
    """
    return pytest.mark.slime_only_where.with_args(holds)


def applies(item: pytest.Item) -> bool:
    """Return True if a collected test applies to its component."""
    mark, case = item.get_closest_marker("slime_only_where"), getattr(item, "cls", None)
    if mark is None or case is None:
        return True
    try:
        return all(holds(case()) for holds in mark.args)
    except Exception:
        return True  # the test that loads the component reports the error


class Contract:
    """Base class of the suites. A subclass may add tests; a replaced test needs `pytest.mark.xfail(reason=...)`."""

    kind: ClassVar[str]
    component: ClassVar[str] = ""
    """Spec of the component: a name, `pkg.mod:attr` or `file.py:attr`."""
    args: ClassVar[Mapping[str, Any]] = {}
    """Settings that differ from the suite's defaults; options of plugins go under `plugins`."""
    default_args: ClassVar[Mapping[str, Any]] = {}
    """The suite's settings that differ from slime's defaults."""

    folder: Path | None = None
    """Temporary directory of each test; `args.run_dir` unless the component's settings change it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A suite is the class that sets `kind`, together with its base classes in the same package.
        packages = {_package(base) for base in cls.__mro__[1:] if base is Contract or "kind" in vars(base)}
        kit = [base for base in cls.__mro__[1:] if _package(base) in packages]
        suite = {name for base in kit for name in vars(base) if name.startswith("test_")}
        for name in suite & set(vars(cls)):
            marks = getattr(vars(cls)[name], "pytestmark", [])
            if not any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks):
                raise TypeError(
                    f"{cls.__name__}.{name} replaces a test of the contract; if the component cannot keep it,"
                    " mark it @pytest.mark.xfail(reason=...)"
                )

    @pytest.fixture(autouse=True)
    def _own_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    @property
    def resolved(self) -> Resolved:
        """The component, loaded and with its signature checked."""
        return resolve(self.kind, self.component, origin=f"{type(self).__name__}.component")

    @property
    def settings(self) -> Args:
        """New `args`: slime's defaults, overridden by the suite's settings and then by the component's."""
        own = copy.deepcopy({**self.default_args, **self.args})
        return Args(**{"run_dir": self.folder and str(self.folder), **own})

    def test_it_loads(self) -> None:
        """Check that the component is found and importable, and has its kind's signature and API version."""
        assert self.component, f"{type(self).__name__}: set `component` to the component's name or path"
        try:
            self.load()
            self.check_options()
        except SlimeError as error:
            pytest.fail(str(error), pytrace=False)

    def load(self) -> None:
        """Load the component. Raises SlimeError if it does not exist or cannot be loaded or called."""
        _ = self.resolved

    def check_options(self) -> None:
        """Check the options in `args` and their documentation. Raises ConfigError."""
        found, settings = self.resolved, self.settings
        check_plugin_options(settings, current_registry(), f"{type(self).__name__}.args", [found])
        model = options_model(found.obj)
        undocumented = [name for name, field in model.model_fields.items() if not field.description] if model else []
        assert not undocumented, f"options need documentation, since --help shows it: {', '.join(undocumented)}"


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def suite_of(kind: str) -> type[Contract]:
    """Return the suite of a kind or hook (`slime.plugins`: hook plugins) from the installed entry points.

    Without such a suite, return `Contract`, which only loads the component. Raises PluginConflictError if several
    distributions provide a suite.
    """
    name = "hooks" if kind == HOOK_GROUP or kind.startswith("slime_") else kind
    found = {entry.value: entry for entry in metadata.entry_points(group=CONTRACTS_GROUP, name=name)}
    if len(found) > 1:
        raise PluginConflictError(f"entry points {name!r} of {CONTRACTS_GROUP!r} are several: {', '.join(found)}")
    suite: type[Contract] = Contract
    for entry in found.values():
        suite = entry.load()
    return suite


def suites(
    kind: str, package: str, facts: Mapping[str, Mapping[str, Any] | None], module: Mapping[str, Any]
) -> dict[str, type[Contract]]:
    """Return a contract class for each component of a kind in a package, for the globals of a test module.

    `facts` maps a component to the class attributes that it needs; a key "name: case" adds a class, and None adds none,
    because another file tests the component. Components without facts that a class of `module` holds are left out.
    Raises KeyError for facts of an unknown component.
    """
    classes = [case for case in module.values() if isinstance(case, type) and issubclass(case, Contract)]
    held = {*facts, *(case.component for case in classes if case is not Contract and case.kind == kind)}
    offered = {name: current_registry().get(kind, name).target for name in current_registry().names(kind)}
    names = [name for name, target in offered.items() if target.startswith((f"{package}.", f"{package}:"))]
    found: dict[str, type[Contract]] = {}
    suite = suite_of(kind)
    for case, own in {**{name: {} for name in names if name not in held}, **facts}.items():
        component = case.partition(":")[0]
        if component not in names:
            raise KeyError(f"{case!r}: {package} has no {kind} plugin {component!r}; it has: {', '.join(names)}")
        if own is not None:
            title = "".join(word.capitalize() for word in re.split(r"[\W_]+", f"test {kind} {case}"))
            attributes = {"__module__": module["__name__"], "kind": kind, "component": component, **own}
            found[title] = type(title, (suite,), attributes)
    return found
