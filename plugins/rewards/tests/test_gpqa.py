from __future__ import annotations

import time
from typing import Any

import pytest
from slime_rewards.gpqa import chosen_letter, reward

from slime_core import Sample
from tests.sweeps import sweep


@sweep(
    "response, expected",
    [
        ("The answer is B", "B"),
        ("the answer is: (C)", "C"),
        ("Answer: D", "D"),
        ("**Answer:** **D**", "D"),
        ("My choice is A.", "A"),
        ("option is [B]", "B"),
        ("B is the correct option", "B"),
        ("(C) is correct", "C"),
        ("A is correct", "A"),
        ("A because of the mass", "A"),
        ("Final answer: D", "D"),
        ("final answer D", "D"),
        (r"\boxed{A}", "A"),
        (r"\boxed{\text{C}}", "C"),
        (r"$\boxed{\mathrm{C}}$", "C"),
        ("I choose option B", "B"),
        ("A, B or C? I say C", "C"),
        ("I think A dog would do", None),
        ("Z", None),
        ("The answer is Z, so D", "D"),
        ("the answer is beautiful", None),
        ("DNA and RNA", None),
        ("", None),
        ('Some say "B", but I do not know.', None),
        ("Which?\nA) one\nB) two\nC) three", None),
        ("A) one\nB) two\nSo C", "C"),
        ("Answer: not B", None),
        ("B is wrong", None),
        ("Die Antwort ist nicht B.", None),
        ("B ist falsch.", None),
        ("La réponse n'est pas B", None),
        ("B est faux", None),
        ("No es B", None),
        ("Nicht B, sondern C", "C"),
        ("B is not correct, so C", "C"),
        ("The answer is not B but C", "C"),
        ("I would not choose B.", None),
        ("It isn't (B).", None),
        ("Rule out B. D", "D"),
        ("answer: b", "B"),
        ("the answer is (b)", "B"),
        ("b", "B"),
        ("(b).", "B"),
        (r"\boxed{b}", "B"),
        ('"B"', "B"),
        ("\u201cB\u201d.", "B"),
        ('Some say "B"', None),
        ("the answer is a", "A"),
        ("the answer is a muon", None),
        ("the answer is e.g. nothing", None),
        ("The answer is B or C", None),
        ("Answer: A, B, C, D", None),
        ("(A) or (B)", None),
        ("The answer is B, C is wrong", "B"),
        ("The answer is B. No, the answer is C.", "C"),
        ("The answer is B. Wait, that is wrong.", None),
        ("The answer cannot be B", None),
        ("Answer: everything but B", None),
        ("Answer: other than B", None),
        ("Answer: not necessarily B", None),
        ("I doubt the answer is B", None),
        ("It's not the case that the answer is B", None),
        ("Answer: B can be excluded", None),
        ("B? No.", None),
        ("Answer: ~~B~~", None),
        ("<del>B</del>", None),
        (r"\cancel{B}", None),
        (r"\boxed{\neg B}", None),
        (r"\boxed{B \lor C}", None),
        ("The answer is B (or C)", None),
        ("The answer is B. Or C.", None),
        ("Answer: option B or option C", None),
        ("Answer: B as well as C", None),
        ("Answer: B oder C", None),
        ("Answer: B\u6216C", None),
        ("\u7b54\u6848\u4e0d\u662fB", None),
        ("Answer: B. Actually, it's C", None),
        ("Answer: B\nCorrection: C", None),
        ("\uff22", "B"),
        ("The answer is B, not C.", "B"),
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
        ("Answer: B", " b ", {}, 1.0),
        ("Answer: B", "(B)", {}, 1.0),
        ("Answer: C", 2, {}, 1.0),
        ("Answer: C", 2.0, {}, 1.0),
        ("Answer: C", "2", {}, 1.0),
        ("Answer: C", ["C"], {}, 1.0),
        ("Answer: B", "A muon.", {"choices": CHOICES}, 1.0),
        ("Answer: C", "A muon.", {"choices": CHOICES}, 0.0),
        ("Answer: B", "a muon", {"choices": dict(zip("ABCD", CHOICES))}, 1.0),
        ("surely a Muon!", "B", {"choices": CHOICES}, 1.0),
        ("surely a quark!", "B", {"choices": CHOICES}, 0.0),
        ("surely a muon!", None, {"correct_answer": "a muon"}, 1.0),
        ("surely a muon!", None, {"answer_text": "muon"}, 1.0),
        ("it is not a muon", None, {"correct_answer": "a muon"}, 0.0),
        ("a muon. Or a quark, or the tau, or an electron", "B", {"choices": CHOICES}, 0.0),
        ("a muon or a kaon", None, {"correct_answer": "a muon"}, 0.0),
        ("0.15", "-15", {}, 0.0),
        ("it is -15", "-15", {}, 1.0),
        ("a muon, a kaon", None, {"correct_answer": "a muon"}, 0.0),
        ("Is it a muon?", None, {"correct_answer": "a muon"}, 0.0),
        ("anything but a muon", None, {"correct_answer": "a muon"}, 0.0),
        ("I first thought of a muon.\nA kaon.", None, {"correct_answer": "a muon"}, 0.0),
        ("surely amuon!", "muon", {}, 0.0),
        ("Answer: K", "K", {"valid_letters": ["K", "L"]}, 1.0),
    ],
)
def test_reward(response: str, label: Any, metadata: dict[str, Any], expected: float) -> None:
    assert reward(None, Sample(response=response, label=label, metadata=metadata)) == expected
