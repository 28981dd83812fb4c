"""What components declare of themselves is read in one place, and checked there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_core.errors import PluginError
from slime_core.plugins.resolve import resolve
from slime_core.protocols import EngineTraits, GenerateTraits, RewardTraits, declares, traits_of


class Engine:
    traits = EngineTraits(takes_images=True)


class Derived(Engine):
    """Inherits what it does not say."""


@declares(GenerateTraits(takes_images=True))
async def generate(args: Any, sample: Any, sampling_params: Any) -> Any:
    return sample


def test_of_a_class_an_object_a_function_and_of_nothing() -> None:
    assert traits_of(Derived, EngineTraits) is traits_of(Derived(), EngineTraits) is Engine.traits
    assert traits_of(generate, GenerateTraits) == GenerateTraits(takes_images=True)
    assert traits_of(None, EngineTraits) == traits_of(object(), EngineTraits) == EngineTraits()


def test_a_value_of_another_type_is_refused_where_it_is_declared() -> None:
    with pytest.raises(
        PluginError, match=r"EngineTraits: takes_images is 'yes'; expected a bool, such as the default False"
    ):
        EngineTraits(takes_images="yes")  # type: ignore[arg-type]


def test_what_nobody_would_read_is_refused_when_it_is_resolved(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def reward(args, sample):\n    return 0.0\nreward.execution = 'thread'\n")
    with pytest.raises(PluginError) as raised:
        resolve("rewards", str(file))
    assert str(raised.value) == (
        f"reward {str(file)!r}: execution = 'thread'; write @declares(RewardTraits(execution='thread'))"
    )


def test_a_declared_function_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from slime_core import RewardTraits, declares\n"
        "@declares(RewardTraits(execution='inline'))\ndef reward(args, sample):\n    return 0.0\n"
    )
    assert traits_of(resolve("rewards", str(file)).obj, RewardTraits).execution == "inline"
