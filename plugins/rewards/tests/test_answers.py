"""Rewards that compare an answer with a label."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_rewards.dapo import TAIL, find_answer, score
from slime_rewards.dapo import reward as dapo_reward
from slime_rewards.deepscaler import equal
from slime_rewards.deepscaler import reward as deepscaler_reward
from slime_rewards.exact import reward
from slime_rewards.f1 import f1_score
from slime_rewards.f1 import reward as f1_reward
from slime_rewards.gpqa import chosen_letter
from slime_rewards.gpqa import reward as gpqa_reward

from slime_core import Sample, SampleStatus
from slime_core.config import Args
from tests.sweeps import sweep


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
        ("42.0", 42, 1.0),
        ("42", "42.0", 0.0),  # texts are compared as texts
        ("43", 42.0, 0.0),
        ("0.5", 0.5, 1.0),
        ("1", True, 0.0),
        (r"\boxed{7}", r"so $\fbox{7}$.", 1.0),
        (r"\boxed{7}", r"so $\boxed 7$.", 1.0),
        ("Rome", ["Paris", "rome"], 1.0),
        ("2", [1, 2.0], 1.0),
    ],
)
def test_labels_by_value_by_box_and_any_of_a_list(response: str, label: object, expected: float) -> None:
    assert reward(None, Sample(response=response, label=label)) == expected


@pytest.mark.parametrize(
    ("prediction", "label", "expected"),
    [
        ("the brown fox", "a quick brown fox", 0.8),
        ("fox fox", "fox", 2 / 3),
        ("fox", "fox fox fox", 0.5),
        ("", "fox", 0.0),
        ("", "", 1.0),
        ("-42", "42", 0.0),
        ("A", "A", 1.0),
        ("C A", "C", 0.0),
        (" +", "+", 1.0),
        ("-", "+", 0.0),
        ("", "<=", 0.0),
        ("noanswer", "noanswer", 1.0),
    ],
)
def test_f1(prediction: str, label: str, expected: float) -> None:
    assert f1_score(prediction, label) == pytest.approx(expected)


@sweep(
    "response, label, expected",
    [
        ("42", 42.0, 1.0),
        ("42", 42.5, 0.0),
        ("\u201cParis\u201d", "Paris", 1.0),
        ("\u300cParis\u300d\u3002", "Paris", 1.0),
        ("\u2212" + "3", "-3", 1.0),
        ("Rome", ["Paris", "Rome"], 1.0),
        ("in Rome", ["Paris", "Rome"], 2 / 3),
        ("", [], 1.0),
        ("true", True, 1.0),
    ],
)
def test_labels_that_are_no_text_and_marks_that_are_not_ascii(response: str, label: object, expected: float) -> None:
    assert f1_reward(None, Sample(response=response, label=label)) == pytest.approx(expected)


@sweep(
    "response, label, correct, pred",
    [
        ("Answer: 1 ... Answer: 2", "2", True, "2"),
        ("Answer: 2\nAnswer: 1", "2", False, "1"),
        ("Answer: 2 dollars\nbye", 2, True, "2"),
        ("**Answer:** 34", "34", True, "34"),
        ("Answer: $34$", 34.0, True, "34"),
        (r"Answer: \boxed{34}", "34", True, "34"),
        ("Answer: Paris", "Paris", True, "Paris"),
        ("34", "34", False, "[INVALID]"),
        ("Answer:", "34", False, "[INVALID]"),
        ("Answer: .", ".", False, ""),
        ("Answer: 34", ["33", 34.0], True, "34"),
        (r"Answer: 1,234,567.0 dollars<|im_end|>", "1234567", True, "1234567"),
        (r"Answer: \frac12", r"\frac{1}{2}", True, r"\frac{1}{2}"),
        ("Answer: true", True, True, "true"),
        ("Answer: not $34$", "34", False, "not34"),
        (r"Answer: anything but \boxed{34}", "34", False, r"anythingbut\boxed{34}"),
        ("Answer: $34$ or $35$", "34", False, "34or35"),
        ("Answer: The answer is $34$.", "34", True, "34"),
        ("Answer: 5 = 4", "4", False, "4"),
        ("Answer: 1 1/2", "11/2", False, "1~1/2"),
        (r"Answer: 4\,5", "45", False, "4~5"),
        ("Answer: 1 000 cm", "1000", True, "1000"),
    ],
)
def test_score(response: str, label: Any, correct: bool, pred: str) -> None:
    assert score(response, label) == {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def test_only_the_tail_is_read() -> None:
    assert find_answer("Answer: 7" + "x" * TAIL) is None
    assert find_answer("y" * 10_000 + "Answer: 7") == "7"


def test_a_mapping_only_for_those_who_read_it() -> None:
    sample = Sample(response="Answer: 7", label="seven")
    assert dapo_reward(Args(reward_key=None), sample) == -1.0
    assert dapo_reward(Args(reward_key="acc"), sample) == score("Answer: 7", "seven")
    args = Args(reward_key=None, eval_reward_key="acc")
    assert dapo_reward(args, sample) == -1.0
    assert dapo_reward(args, sample, evaluation=True) == score("Answer: 7", "seven")
    assert dapo_reward(Args(custom_reward_post_process_path="m.f"), sample) == score("Answer: 7", "seven")


@sweep(
    "answer, label, expected",
    [
        ("x+1", "1+x", True),
        (r"\frac{2}{4}", r"\frac{1}{2}", False),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("(1,2)", "(1, 2)", True),
        ("(1,2]", "(1,2)", False),
        (r"(1,\sqrt{4})", "(1,2)", True),
        ("2.0001", "2", False),
        ("", "2", False),
        ("", "", False),
        ("Paris", "Paris", True),
        (r"\frac12", "0.5", True),
        (r"45^\circ", "x = 45", True),
        (r"\left(1, 2\right)", "(1,2)", True),
        ("1 or 2", "1, 2", True),
        (r"\{1,2\}", "{1,2}", True),
        (r"5\text{ is wrong}", "5", False),
        (r"not 5", "5", False),
        ("5 = 4", "4", False),
        ("2^{40} 3^{20}", r"3^{20} 2^{40}", True),
        (r"\phantom{5}", "5", False),
        ("5_{7}", "5", False),
        ("12", "12_5", True),
        ("1 1/2", "11/2", False),
        (r"4\,5", "45", False),
        ("1 000", "1000", True),
    ],
)
def test_equality(answer: str, label: str, expected: bool) -> None:
    assert equal(answer, label) == expected


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (r"<think>a</think>\boxed{7}", 7.0, 1.0),
        (r"<think>a</think>\boxed{7}", ["8", "7"], 1.0),
        (r"<think>a</think> 7", "7", 0.0),
        (r"<think>\boxed{7}", "7", 0.0),
        (r"###Response\boxed{1} ###Response \boxed{7}", "7", 1.0),
        (r"</think>\boxed{7}</think>", "7", 0.0),
    ],
)
def test_markers_and_labels(response: str, label: Any, expected: float) -> None:
    assert deepscaler_reward(None, Sample(response=response, label=label)) == expected


@pytest.mark.parametrize(
    "bomb",
    [
        "9^{9^{9}}",
        "2^{99999}",
        "99999!",
        "(9!)!",
        "x" * 5000,
        " " * 20_000 + "5 6",
        "1E99999",
    ],
)
def test_what_would_not_fit_in_memory_is_not_evaluated(bomb: str) -> None:
    started = time.monotonic()
    assert not equal(bomb, "5")
    assert not equal(f"{bomb} 1/{'1' * 5000}", "1/2")
    assert time.monotonic() - started < 10


def test_an_answer_runs_no_code() -> None:
    equal("__import__('os').putenv('SLIME_X','1')", "5")
    equal("os.environ.update(SLIME_X=1)", "5")
    assert "SLIME_X" not in os.environ


@settings(deadline=None)
@given(st.text(alphabet="0123456789xy+-*/^(){}[]\\ .,=!", max_size=25))
def test_odd_mathematics_never_raises(text: str) -> None:
    assert deepscaler_reward(None, Sample(response=rf"</think>\boxed{{{text}}}", label="x+1")) in (0.0, 1.0)


@sweep(
    "response, expected",
    [
        ("The answer is B", "B"),
        ("**Answer:** **D**", "D"),
        ("My choice is A.", "A"),
        ("B is the correct option", "B"),
        ("A because of the mass", "A"),
        ("final answer D", "D"),
        (r"\boxed{\text{C}}", "C"),
        (r"$\boxed{\mathrm{C}}$", "C"),
        ("A, B or C? I say C", "C"),
        ("I think A dog would do", None),
        ("The answer is Z, so D", "D"),
        ("DNA and RNA", None),
        ("", None),
        ('Some say "B", but I do not know.', None),
        ("Which?\nA) one\nB) two\nC) three", None),
        ("A) one\nB) two\nSo C", "C"),
        ("Answer: not B", None),
        ("Die Antwort ist nicht B.", None),
        ("La réponse n'est pas B", None),
        ("Nicht B, sondern C", "C"),
        ("B is not correct, so C", "C"),
        ("I would not choose B.", None),
        ("Rule out B. D", "D"),
        ("answer: b", "B"),
        ("(b).", "B"),
        ("\u201cB\u201d.", "B"),
        ("the answer is a", "A"),
        ("the answer is a muon", None),
        ("The answer is B or C", None),
        ("(A) or (B)", None),
        ("The answer is B, C is wrong", "B"),
        ("The answer is B. No, the answer is C.", "C"),
        ("The answer cannot be B", None),
        ("Answer: everything but B", None),
        ("Answer: not necessarily B", None),
        ("It's not the case that the answer is B", None),
        ("Answer: B can be excluded", None),
        ("B? No.", None),
        ("Answer: ~~B~~", None),
        (r"\cancel{B}", None),
        (r"\boxed{B \lor C}", None),
        ("The answer is B. Or C.", None),
        ("Answer: B\u6216C", None),
        ("\u7b54\u6848\u4e0d\u662fB", None),
        ("Answer: B\nCorrection: C", None),
        ("\uff22", "B"),
        ("It is not A, so the answer is B", "B"),
    ],
)
def test_chosen_letter(response: str, expected: str | None) -> None:
    assert chosen_letter(response) == expected


@pytest.mark.parametrize("text", ["answer is" + " " * 20_000, "final answer" + "\t \n" * 7_000, "<del>" * 5_000])
def test_long_runs_are_read_at_once(text: str) -> None:
    started = time.process_time()
    assert chosen_letter(text) is None
    assert time.process_time() - started < 2


CHOICES = ["an electron", "a muon", "the tau", "a quark"]


@sweep(
    "response, label, metadata, expected",
    [
        ("<think>The answer is A</think> B", "B", {}, 1.0),
        ("Answer: B", "A", {"correct_letter": "B"}, 1.0),
        ("Answer: B", "(B)", {}, 1.0),
        ("Answer: C", 2, {}, 1.0),
        ("Answer: C", "2", {}, 1.0),
        ("Answer: B", "A muon.", {"choices": CHOICES}, 1.0),
        ("Answer: C", "A muon.", {"choices": CHOICES}, 0.0),
        ("Answer: B", "a muon", {"choices": dict(zip("ABCD", CHOICES))}, 1.0),
        ("surely a Muon!", "B", {"choices": CHOICES}, 1.0),
        ("surely a muon!", None, {"answer_text": "muon"}, 1.0),
        ("it is not a muon", None, {"correct_answer": "a muon"}, 0.0),
        ("a muon. Or a quark, or the tau, or an electron", "B", {"choices": CHOICES}, 0.0),
        ("0.15", "-15", {}, 0.0),
        ("a muon, a kaon", None, {"correct_answer": "a muon"}, 0.0),
        ("anything but a muon", None, {"correct_answer": "a muon"}, 0.0),
        ("I first thought of a muon.\nA kaon.", None, {"correct_answer": "a muon"}, 0.0),
        ("surely amuon!", "muon", {}, 0.0),
        ("Answer: K", "K", {"valid_letters": ["K", "L"]}, 1.0),
    ],
)
def test_reward(response: str, label: Any, metadata: dict[str, Any], expected: float) -> None:
    assert gpqa_reward(None, Sample(response=response, label=label, metadata=metadata)) == expected
