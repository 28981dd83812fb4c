from __future__ import annotations

from typing import Any

from slime_rewards.dapo import TAIL, find_answer, normalized, reward, score

from slime_core import Sample
from slime_core.config import Args
from tests.sweeps import sweep


@sweep(
    "text, expected",
    [
        ("1,234,567", "1234567"),
        ("100 dollars", "100"),
        ("42<|im_end|>", "42"),
        ("42</s>", "42"),
        ("  42. ", "42"),
        ("x = 5", "5"),
        (r"\text{yes}", "yes"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"45^\circ", "45"),
        (r"50\%", "50"),
        ("007", "7"),
        ("42.0", "42"),
        ("4.20", "4.20"),
        ("1,2", "1,2"),
        ("(1, 2)", "(1,2)"),
        ("12{,}345", "12345"),
        ("-3", "-3"),
        ("meters", ""),
        ("gamma", "gamma"),
    ],
)
def test_normalised(text: str, expected: str) -> None:
    assert normalized(text) == expected


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
        ("Answer: x+1", "x + 1", True, "x+1"),
        ("34", "34", False, "[INVALID]"),
        (r"\boxed{34}", "34", False, "[INVALID]"),
        ("Answer:", "34", False, "[INVALID]"),
        ("Answer: .", ".", False, ""),
        ("Answer: 34", ["33", 34.0], True, "34"),
        ("Answer: 34", '["34"]', True, "34"),
        ("Answer: true", True, True, "true"),
        ("Answer: not $34$", "34", False, "not34"),
        (r"Answer: anything but \boxed{34}", "34", False, r"anythingbut\boxed{34}"),
        ("Answer: $34$ or $35$", "34", False, "34or35"),
        ("Answer: $34$, $35$", "34", False, "34,35"),
        ("Answer: $34$ is wrong", "34", False, "34iswrong"),
        ("Answer: The answer is $34$.", "34", True, "34"),
        ("Answer: 5 = 4", "4", False, "4"),
        ("Answer: 2 + 2 = 4", "4", True, "4"),
        ("Answer: 1 1/2", "11/2", False, "1~1/2"),
        ("Answer: 4 5", "45", False, "4~5"),
        (r"Answer: 4\,5", "45", False, "4~5"),
        ("Answer: 1 000 cm", "1000", True, "1000"),
        ("Answer: True or False", "True or False", True, "TrueorFalse"),
    ],
)
def test_score(response: str, label: Any, correct: bool, pred: str) -> None:
    assert score(response, label) == {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def test_only_the_tail_is_read() -> None:
    assert find_answer("Answer: 7" + "x" * TAIL) is None
    assert find_answer("y" * 10_000 + "Answer: 7") == "7"


def test_a_mapping_only_for_those_who_read_it() -> None:
    sample = Sample(response="Answer: 7", label="seven")
    assert reward(Args(reward_key=None), sample) == -1.0
    assert reward(Args(reward_key="acc"), sample) == score("Answer: 7", "seven")
    args = Args(reward_key=None, eval_reward_key="acc")
    assert reward(args, sample) == -1.0
    assert reward(args, sample, evaluation=True) == score("Answer: 7", "seven")
    assert reward(Args(custom_reward_post_process_path="m.f"), sample) == score("Answer: 7", "seven")
