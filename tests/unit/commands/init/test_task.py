from __future__ import annotations

import re

import pytest
from slime_commands.init import task


def test_held_out_problems_are_never_trained_on_in_either_order() -> None:
    train, held_out = task.split_problems()
    assert len(held_out) == len(set(held_out)) == 500
    assert len(train) == len(set(train)) >= 7590
    assert not {frozenset(p) for p in train} & {frozenset(p) for p in held_out}
    assert {operand for p in train + held_out for operand in p} == set(range(10, 100))


def test_texts() -> None:
    assert task.question((37, 48)) == "37+48=?"
    assert task.direct_answer((37, 48)) == r"\boxed{85}"
    assert task.worked_answer((37, 48)) == r"7+8=15 3+4+1=8 \boxed{85}"
    assert task.worked_answer((91, 94)) == r"1+4=5 9+9+0=18 \boxed{185}"


def test_every_worked_answer_adds_up() -> None:
    for a in task.OPERANDS:
        for b in task.OPERANDS:
            steps, boxed = task.worked_answer((a, b)).split(r" \boxed")
            for left, right in (step.split("=") for step in steps.split()):
                assert sum(int(part) for part in left.split("+")) == int(right)
            ones, tens = (int(step.split("=")[1]) for step in steps.split())
            assert tens * 10 + ones % 10 == a + b == int(boxed.strip("{}"))


def test_warm_up_rows() -> None:
    train, held_out = task.split_problems()
    worked, mixed = task.warmup_rows(train, seed=3)
    assert (len(worked), len(mixed)) == (6500, 1500)
    forbidden = {task.question(p) for p in held_out}
    for row in worked + mixed:
        user, assistant = row["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert user["content"] not in forbidden
        a, b = map(int, re.findall(r"\d+", user["content"]))
        assert assistant["content"] in (task.direct_answer((a, b)), task.worked_answer((a, b)))
    assert all(" " in row["messages"][1]["content"] for row in worked)
    direct = sum(" " not in row["messages"][1]["content"] for row in mixed)
    assert direct / len(mixed) == pytest.approx(task.DIRECT_SHARE, abs=0.04)
    assert task.warmup_rows(train, seed=3) == (worked, mixed)
    assert task.warmup_rows(train, seed=4)[0] != worked
