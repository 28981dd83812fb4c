"""What is said of policies for groups that hang when no group can."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slime_core.config import Settings

Load = Callable[..., Settings]


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--group-timeout-policy drop", "--group-timeout-policy 'drop' (flag) has no effect without --group-timeout."),
        ("--group-timeout-retries 3", "--group-timeout-retries 3 (flag) has no effect without --group-timeout."),
        (
            "--group-timeout 5 --group-timeout-policy drop --group-timeout-retries 3",
            "--group-timeout-retries 3 (flag) has no effect without --group-timeout-policy retry.",
        ),
    ],
)
def test_settings_without_effect(load: Load, flags: str, warning: str) -> None:
    assert warning in load(*flags.split()).warnings


def test_what_has_an_effect_is_not_warned_of(load: Load) -> None:
    settings = load("--group-timeout", "5", "--group-timeout-policy", "retry", "--group-timeout-retries", "3")
    assert not [w for w in settings.warnings if "group-timeout" in w]
