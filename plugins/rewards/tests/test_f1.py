from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_rewards.f1 import f1_score, normalized_tokens, reward

from slime_core import Sample
from tests.sweeps import sweep


def test_normalisation() -> None:
    assert normalized_tokens("The  Quick, brown fox's -- an A!") == ["quick", "brown", "foxs"]


@pytest.mark.parametrize(
    ("prediction", "label", "expected"),
    [
        ("the brown fox", "a quick brown fox", 0.8),
        ("fox fox", "fox", 2 / 3),
        ("fox", "fox fox fox", 0.5),
        ("b a", "a b", 1.0),
        ("", "fox", 0.0),
        ("the", "the", 1.0),
        ("", "", 1.0),
        ("fox", "", 0.0),
        ("-42", "42", 0.0),
        ("35", "3.5", 0.0),
        ("", "A", 0.0),
        ("A", "A", 1.0),
        ("C A", "C", 0.0),
        ("noanswer", "noanswer", 1.0),
        ("noanswer here", "noanswer", 0.0),
    ],
)
def test_f1(prediction: str, label: str, expected: float) -> None:
    assert f1_score(prediction, label) == pytest.approx(expected)


@sweep(
    "response, label, expected",
    [
        ("42", 42.0, 1.0),
        ("42", 42, 1.0),
        ("42", 42.5, 0.0),
        ("42.5", 42.5, 1.0),
        ("\u201cParis\u201d", "Paris", 1.0),
        ("\u300cParis\u300d\u3002", "Paris", 1.0),
        ("\u2212" + "3", "-3", 1.0),
        ("Rome", ["Paris", "Rome"], 1.0),
        ("in Rome", ["Paris", "Rome"], 2 / 3),
        ("Rome", [], 0.0),
        ("", [], 1.0),
        ("Rome", "", 0.0),
        ("true", True, 1.0),
    ],
)
def test_labels_that_are_no_text_and_marks_that_are_not_ascii(response: str, label: object, expected: float) -> None:
    assert reward(None, Sample(response=response, label=label)) == pytest.approx(expected)


@settings(deadline=None)
@given(st.text(), st.text())
def test_always_a_fraction_and_symmetric(prediction: str, label: str) -> None:
    found = f1_score(prediction, label)
    assert 0.0 <= found <= 1.0
    assert found == pytest.approx(f1_score(label, prediction))
