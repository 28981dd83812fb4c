"""What all contract suites share: the component under test, its settings, and a guard on the suite itself.

`suite_of` finds the suite of a kind, slime's own and those of anybody else, by entry point.
"""

from __future__ import annotations

import copy
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
from slime_core.plugins.options import check_plugin_options, option_rows, options_model
from slime_core.plugins.registry import Resolved
from slime_core.plugins.resolve import resolve


def only_where(holds: Callable[[Any], bool]) -> pytest.MarkDecorator:
    """A test for some components of a kind only: `holds` is asked with the suite's instance when tests are collected.

    A component that it cannot be asked of, as one that does not load, keeps the test.
    """
    return pytest.mark.slime_only_where.with_args(holds)


def applies(item: pytest.Item) -> bool:
    """Whether a collected test is one of its component's."""
    mark, case = item.get_closest_marker("slime_only_where"), getattr(item, "cls", None)
    if mark is None or case is None:
        return True
    try:
        return all(holds(case()) for holds in mark.args)
    except Exception:
        return True  # the test that loads the component says what is wrong with it


class Contract:
    """Base of the suites. A subclass may add tests; replacing one needs `pytest.mark.xfail(reason=...)` on it."""

    kind: ClassVar[str]
    component: ClassVar[str] = ""
    """Any spec the resolver takes: a name, `pkg.mod:attr`, `file.py:attr`."""
    args: ClassVar[Mapping[str, Any]] = {}
    """Settings that differ from the suite's; options of plugins under `plugins`."""
    default_args: ClassVar[Mapping[str, Any]] = {}
    """The suite's settings that differ from slime's defaults."""

    folder: Path | None = None
    """A temporary directory of each test, `args.run_dir` unless the component's settings say otherwise."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A suite is the class that says of which kind it is, with what its package made it of.
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
        """The component, loaded and signature-checked."""
        return resolve(self.kind, self.component, origin=f"{type(self).__name__}.component")

    @property
    def settings(self) -> Args:
        """A fresh `args`: every setting of slime's with its default, then the suite's, then the component's."""
        own = copy.deepcopy({**self.default_args, **self.args})
        return Args(**{"run_dir": self.folder and str(self.folder), **own})

    def test_it_loads(self) -> None:
        """Found, importable, of its kind's signature, and for the version of its API that is running."""
        assert self.component, f"{type(self).__name__}: set `component` to the component's name or path"
        try:
            self.load()
            self.check_options()
        except SlimeError as error:
            pytest.fail(str(error), pytrace=False)

    def load(self) -> None:
        """Raises SlimeError when there is no such component, or it cannot be loaded or called."""
        _ = self.resolved

    def check_options(self) -> None:
        """The options in `args`, and their documentation. Raises ConfigError."""
        found, settings = self.resolved, self.settings
        check_plugin_options(settings, current_registry(), f"{type(self).__name__}.args", [found])
        model = options_model(found.obj)
        undocumented = [row.name for row in option_rows(model) if not row.help] if model else []
        assert not undocumented, f"options need documentation, since --help shows it: {', '.join(undocumented)}"


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def suite_of(kind: str) -> type[Contract]:
    """The suite of a kind or hook (`slime.plugins`: hook plugins), by the entry points of installed distributions.

    `Contract`, which loads the component, where there is none. Raises PluginConflictError: two distributions have one.
    """
    name = "hooks" if kind == HOOK_GROUP or kind.startswith("slime_") else kind
    found = {entry.value: entry for entry in metadata.entry_points(group=CONTRACTS_GROUP, name=name)}
    if len(found) > 1:
        raise PluginConflictError(f"entry points {name!r} of {CONTRACTS_GROUP!r} are several: {', '.join(found)}")
    suite: type[Contract] = Contract
    for entry in found.values():
        suite = entry.load()
    return suite
