from __future__ import annotations

import os
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_rewards.deepscaler import equal, normalized, reward

from slime_core import Sample
from tests.sweeps import sweep


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac{1}2", r"\frac{1}{2}"),
        (r"\tfrac{1}{2}", r"\frac{1}{2}"),
        ("0.5", r"\frac{1}{2}"),
        (".5", r"\frac{1}{2}"),
        (r"45^\circ", "45"),
        (r"45^{\circ}", "45"),
        ("3/4", r"\frac{3}{4}"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("x = 5", "5"),
        (r"\$5", "5"),
        (r"50\%", "50"),
        (r"5\text{ cm}^2", "5"),
        (r"\text{Paris}", "Paris"),
        ("1,234,567", "1234567"),
        ("1,2", "1,2"),
        (r"\left(1, 2\right)", "(1,2)"),
        ("", ""),
    ],
)
def test_spelling(text: str, expected: str) -> None:
    assert normalized(text) == expected


@sweep(
    "answer, label, expected",
    [
        ("x+1", "1+x", True),
        (r"\frac{2}{4}", r"\frac{1}{2}", False),
        ("2/4", "1/2", False),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("(x+1)^2", "x^2+2x+1", True),
        ("(1,2)", "(1, 2)", True),
        ("(2,1)", "(1,2)", False),
        ("(1,2]", "(1,2)", False),
        (r"(1,\sqrt{4})", "(1,2)", True),
        ("3", "2", False),
        ("2.0001", "2", False),
        ("", "2", False),
        ("2", "", False),
        ("", "", False),
        ("Paris", "Paris", True),
        ("paris", "Paris", True),
        ("1 or 2", "1, 2", True),
        ("1, 2, and 3", "1,2,3", True),
        (r"\{1,2\}", "{1,2}", True),
        (r"5\text{ is wrong}", "5", False),
        (r"5\text{ or not}", "5", False),
        (r"not 5", "5", False),
        ("5 = 4", "4", False),
        ("2^{40} 3^{20}", r"3^{20} 2^{40}", True),
        ("x^8 x^7 + x^{6} x^5", "x^{11} + x^{15}", True),
        ("{5}", "5", True),
        (r"\phantom{5}", "5", False),
        ("5_{7}", "5", False),
        ("12", "12_5", True),
        ("1 1/2", "11/2", False),
        ("4 5", "45", False),
        (r"4\,5", "45", False),
        ("1 000", "1000", True),
    ],
)
def test_equality(answer: str, label: str, expected: bool) -> None:
    assert equal(answer, label) == expected


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (r"<think>a</think>\boxed{7}", 7, 1.0),
        (r"<think>a</think>\boxed{7}", 7.0, 1.0),
        (r"<think>a</think>\boxed{7}", ["8", "7"], 1.0),
        (r"<think>a</think> 7", "7", 0.0),
        (r"<think>\boxed{7}", "7", 0.0),
        (r"###Response\boxed{1} ###Response \boxed{7}", "7", 1.0),
        (r"</think>\boxed{1}</think>\boxed{7}", "7", 1.0),
        (r"</think>\boxed{7}</think>", "7", 0.0),
    ],
)
def test_markers_and_labels(response: str, label: Any, expected: float) -> None:
    assert reward(None, Sample(response=response, label=label)) == expected


@pytest.mark.parametrize(
    "bomb",
    [
        "9^{9^{9}}",
        "9^9^9",
        "2^{99999}",
        "99999!",
        "(9!)!",
        "9**9**9",
        "10!!",
        "x" * 5000,
        " " * 20_000 + "5 6",
        "1E99999",
    ],
)
def test_what_would_not_fit_in_memory_is_not_evaluated(bomb: str) -> None:
    started = time.monotonic()
    assert not equal(bomb, "5")
    assert time.monotonic() - started < 10


def test_an_answer_runs_no_code() -> None:
    equal("__import__('os').putenv('SLIME_X','1')", "5")
    equal("os.environ.update(SLIME_X=1)", "5")
    assert "SLIME_X" not in os.environ


@given(st.text(alphabet="0123456789xy+-*/^(){}[]\\ .,=!", max_size=25))
def test_odd_mathematics_never_raises(text: str) -> None:
    assert reward(None, Sample(response=rf"</think>\boxed{{{text}}}", label="x+1")) in (0.0, 1.0)
