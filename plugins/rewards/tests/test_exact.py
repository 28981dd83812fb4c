from __future__ import annotations

import pytest
from slime_rewards.exact import last_boxed, reward

from slime_core import Sample, SampleStatus
from tests.sweeps import sweep


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{85}", "85"),
        (r"7+8=15 \boxed{85}<|end|>", "85"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{}", ""),
        (r"\boxed{85", None),
        (r"\boxed{1} then \boxed{2", None),
    ],
)
def test_last_boxed(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


def test_a_truncated_response_has_no_final_answer() -> None:
    sample = Sample(response=r"\boxed{2} and", label="2", status=SampleStatus.COMPLETED)
    assert reward(None, sample) == 1.0
    sample.status = SampleStatus.TRUNCATED
    assert reward(None, sample) == 0.0


def test_labels_of_other_types() -> None:
    assert reward(None, Sample(response=r"\boxed{True}", label=True)) == 1.0
    for label in (None, "", " ", float("nan"), [], [None], [["2"]], {}, {"answer": "2"}, b"2"):
        with pytest.raises(ValueError, match="expected a text, a number, or a list of them"):
            reward(None, Sample(response="2", label=label))


@sweep(
    "response, label, expected",
    [
        (r"\boxed{42}", 42.0, 1.0),
        ("42", 42.0, 1.0),
        ("42.0", 42, 1.0),
        ("1,000", 1000, 1.0),
        ("42", "42.0", 0.0),  # texts are compared as texts
        ("43", 42.0, 0.0),
        ("0.5", 0.5, 1.0),
        ("1", True, 0.0),
        (r"\boxed{7}", r"so $\fbox{7}$.", 1.0),
        (r"\boxed{7}", r"so $\boxed 7$.", 1.0),
        (r"\boxed {7}", r"so $\boxed {7}$.", 1.0),
        ("Rome", ["Paris", "rome"], 1.0),
        ("Oslo", ["Paris", "rome"], 0.0),
        ("2", [1, 2.0], 1.0),
    ],
)
def test_labels_by_value_by_box_and_any_of_a_list(response: str, label: object, expected: float) -> None:
    assert reward(None, Sample(response=response, label=label)) == expected
