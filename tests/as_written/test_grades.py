r"""Every grader of mathematics takes every spelling of a number; what they do not agree on is listed here, and why.

`AS_TEXT` are spellings that are equal, by value; each is an answer to each of its class, and to no number of another.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import slime_reward_math
import slime_rewards.dapo
import slime_rewards.deepscaler
from slime.rollout.rm_hub import math_dapo_utils, math_utils

from slime_core import Sample, same_number
from slime_core.config import Args

AS_TEXT = {
    "1000": [
        "1000", "1,000", "1000.0", "1000.", "+1000", "01000", "1e3", "1E+3", "1{,}000", r"1\,000", r"1,\!000", "1 000",
        r"10^3", r"10^{3}", r"1\times10^3", r"1.0 \times 10^{3}", r"\$1,000", "2000/2", r"\frac{2000}{2}",
    ],
    "-3/2": [
        "-1.5", "-1.50", "\u22121.5", "-3/2", r"-\frac{3}{2}", r"\frac{-3}{2}", r"\frac{3}{-2}", r"-\frac32",
        r"-\dfrac{3}{2}", "-15e-1", "-1 1/2", r"-1\frac{1}{2}",
    ],
    "1/2": ["0.5", ".5", "0.50", "1/2", r"\frac{1}{2}", r"\frac12", r"\tfrac{1}{2}", "5e-1", "2/4", r"\frac{2}{4}"],
    "42": ["42", "42.0", "042", "84/2", "4.2e1", r"\dfrac{84}{2}", r"$42$"],
    "0": ["0", "-0", "0.0", "0/5"],
    "0.333": ["0.333", "333/1000"],
    "1/3": ["1/3", r"\frac{1}{3}"],
}  # fmt: skip


def math(answer: str, label: str) -> bool:
    return slime_reward_math.reward(None, Sample(response=rf"so \boxed{{{answer}}}", label=label)) == 1.0


def dapo(answer: str, label: str) -> bool:
    return slime_rewards.dapo.reward(Args(), Sample(response=f"Answer: {answer}", label=label)) == 1.0


def deepscaler(answer: str, label: str) -> bool:
    return slime_rewards.deepscaler.reward(None, Sample(response=rf"</think>\boxed{{{answer}}}", label=label)) == 1.0


def grade_answer_verl(answer: str, label: str) -> bool:
    return math_utils.grade_answer_verl(rf"so \boxed{{{answer}}}", label)


def compute_score(answer: str, label: str) -> bool:
    return bool(math_dapo_utils.compute_score(f"Answer: {answer}", label)["acc"])


Grader = Callable[[str, str], bool]
GRADERS: list[Grader] = [math, dapo, deepscaler, grade_answer_verl, math_utils.grade_answer_sympy, compute_score]
OF_MATH: list[Grader] = [deepscaler, grade_answer_verl, math_utils.grade_answer_sympy]
"""The grader of the MATH data set: a fraction that answers a fraction has to be reduced."""
UNREDUCED = {"2/4", r"\frac{2}{4}", "2000/2", r"\frac{2000}{2}", "84/2", r"\dfrac{84}{2}", "0/5"}


@pytest.mark.parametrize("grader", GRADERS, ids=lambda grader: grader.__name__)
def test_equal_numbers_are_equal_however_they_are_written(grader: Grader) -> None:
    for spellings in AS_TEXT.values():
        for answer, label in product(spellings, spellings):
            fractions = "/" in label or "frac" in label
            refused = grader in OF_MATH and fractions and answer in UNREDUCED and same_text(answer, label) is False
            assert grader(answer, label) == (not refused), (answer, label)


def same_text(answer: str, label: str) -> bool:
    return math_utils.mathd_normalize_answer(answer) == math_utils.mathd_normalize_answer(label)


@pytest.mark.parametrize("grader", GRADERS, ids=lambda grader: grader.__name__)
def test_other_numbers_are_others_however_near(grader: Grader) -> None:
    firsts = [spellings[-1] for spellings in AS_TEXT.values()]
    near = [("42.00000001", "42"), ("1,5", "15"), ("12,34", "1234"), ("1_000", "1000"), ("1/0", "2"), ("0x10", "16")]
    for answer, label in [*((a, b) for a, b in product(firsts, firsts) if a is not b), *near]:
        assert not grader(answer, label), (answer, label)


@pytest.mark.parametrize(
    ("answer", "label", "right"),
    [
        (r"50\%", "50", GRADERS),
        ("50.0%", "50", GRADERS),
        (r"50\%", "0.5", [math]),  # math-verify's reading; in THUDM/slime's graders a percent sign says nothing
        ("0.3333333333", "1/3", []),  # math-verify rounds to six digits, by which small numbers are equal, too
        ("42 cm", "42", GRADERS),
        (r"42\text{ cm}", "42", GRADERS),
        ("84/2", "42", GRADERS),  # THUDM/slime's grader refuses what has to be worked out where the label is an integer
        ("1/2", "2/4", GRADERS),  # it also refuses a reduced fraction where the label is not
        ("42.00000001", "42", []),  # and takes what is within 1e-7 of an integer
        ("x+1", "1+x", [math, *OF_MATH]),  # DAPO's answers are numbers; other texts are compared as spelt
    ],
)
def test_where_graders_differ_it_is_on_purpose(answer: str, label: str, right: list[Grader]) -> None:
    assert [grader.__name__ for grader in GRADERS if grader(answer, label)] == [g.__name__ for g in right]


def test_what_is_no_number_is_left_to_the_graders() -> None:
    for text in ["", ".", "-", "x", "1e", "1e99999", "1/2/3", "1,0000", "(3)", "inf", "50%", "7" * 300, r"\frac{1}{0}"]:
        assert same_number(text, "1") is None, text
    assert same_number("1e400", "1") is False
    assert same_number("\u0663", "3") is True
