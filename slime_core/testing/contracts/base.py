"""What all contract suites share: the component under test, its settings, and a guard on the suite itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from slime_core.config.spec import flag_specs
from slime_core.errors import SlimeError
from slime_core.plugins.manager import current_registry
from slime_core.plugins.options import Used, check_plugin_options, option_rows, options_model
from slime_core.plugins.resolve import Resolved, resolve
from slime_core.types import Sample, SampleStatus


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
        kit = [base for base in cls.__mro__[1:] if base.__module__.startswith("slime_core.testing.")]
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
    def settings(self) -> SimpleNamespace:
        """A fresh `args`: every setting of slime's with its default, then the suite's, then the component's."""
        own = copy.deepcopy({**self.default_args, **self.args})
        return SimpleNamespace(**{**flag_defaults(), "run_dir": self.folder and str(self.folder), **own})

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
        check_plugin_options(settings, current_registry(), f"{type(self).__name__}.args", [Used(found.ref, found.obj)])
        model = options_model(found.obj)
        undocumented = [row.name for row in option_rows(model) if not row.help] if model else []
        assert not undocumented, f"options need documentation, since --help shows it: {', '.join(undocumented)}"


def flag_defaults() -> dict[str, Any]:
    """Setting -> its default."""
    return {name: copy.deepcopy(spec.default) for name, spec in flag_specs().items()}


def answered_sample(
    prompt: str = "1+1=", response: str = "2", label: Any = "2", status: SampleStatus = SampleStatus.COMPLETED
) -> Sample:
    """A sample as a reward sees it, one token per character."""
    sample = Sample(group_index=0, index=0, prompt=prompt, label=label, tokens=[ord(c) for c in prompt])
    tokens = [ord(c) for c in response]
    sample.append_response_tokens(None, tokens, [-0.5] * len(tokens), text=response)
    sample.status = status
    return sample


def scored_group(rewards: list[float | None], group_index: int = 0) -> list[Sample]:
    """A group as a filter sees it."""
    group = []
    for position, reward in enumerate(rewards):
        sample = answered_sample()
        sample.group_index, sample.index, sample.reward = group_index, group_index * 100 + position, reward
        group.append(sample)
    return group
