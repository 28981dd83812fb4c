"""What all contract suites share: the component under test, its settings, and a guard on the suite itself."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

from slime_core.plugins.resolve import Resolved, resolve
from slime_core.types import Sample, SampleStatus


class Contract:
    """Base of the suites. A subclass may add tests; replacing one needs `pytest.mark.xfail(reason=...)` on it."""

    kind: ClassVar[str]
    component: ClassVar[str] = ""
    """Any spec the resolver takes: a name, `pkg.mod:attr`, `file.py:attr`."""
    args: ClassVar[Mapping[str, Any]] = {}
    """Settings that differ from the suite's."""
    default_args: ClassVar[Mapping[str, Any]] = {"reward_key": None}

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

    @property
    def resolved(self) -> Resolved:
        """The component, loaded and signature-checked."""
        return resolve(self.kind, self.component, origin=f"{type(self).__name__}.component")

    @property
    def settings(self) -> SimpleNamespace:
        """A fresh `args`."""
        return SimpleNamespace(**{**self.default_args, **self.args})


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
