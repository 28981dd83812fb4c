"""The suite every reward is held to; slime's own pass the same one."""

from __future__ import annotations

from typing import ClassVar

from slime_testing_contracts import RewardContract


class TestDigits(RewardContract):
    component = "digits"
    examples: ClassVar = [
        ("count", "12 ", "", 2 / 3),
        ("count", "abc", "", 0.0),
        ("count", "2024", "", 1.0),
        ("count", "", "", 0.0),
    ]


class TestDigitsWithoutBlanks(RewardContract):
    component = "digits"
    args: ClassVar = {"plugins": {"digits": {"ignore_blanks": True}}}
    examples: ClassVar = [("count", "12 ", "", 1.0), ("count", " \n", "", 0.0)]
