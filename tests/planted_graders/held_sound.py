"""Sound graders, written after the attacks."""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation
from typing import Any

from slime_core import last_boxed
from tests.planted_graders.judge import ask


def number_decimal(args: Any, sample: Any) -> float:
    try:
        return float(Decimal((last_boxed(sample.response) or "").strip()) == Decimal(str(sample.label)))
    except InvalidOperation:
        return 0.0


def number_last_tag_by_value(args: Any, sample: Any) -> float:
    found = re.findall(r"<answer>(.*?)</answer>", sample.response, re.DOTALL)
    try:
        return float(bool(found) and float(found[-1]) == float(sample.label))
    except ValueError:
        return 0.0


def number_two_parts(args: Any, sample: Any) -> float:
    _, found, tail = sample.response.rpartition("</think>")
    form = 0.2 * bool(found)
    return form + 0.8 * ((last_boxed(tail) or "").strip() == str(sample.label)) * bool(found)


def number_minus_half(args: Any, sample: Any) -> float:
    boxed = last_boxed(sample.response)
    if boxed is None:
        return -1.0
    return 1.0 if boxed.strip() == str(sample.label) else -0.5


def number_last_line(args: Any, sample: Any) -> float:
    lines = sample.response.strip().splitlines() or [""]
    return float(lines[-1].strip() == f"#### {sample.label}")


def number_final_answer_line(args: Any, sample: Any) -> float:
    lines = sample.response.strip().splitlines() or [""]
    return float(
        re.fullmatch(rf"(?:Final answer|Answer): {re.escape(str(sample.label))}", lines[-1].strip()) is not None
    )


def number_bold(args: Any, sample: Any) -> float:
    found = re.findall(r"\*\*(.+?)\*\*", sample.response)
    return float(len(found) == 1 and found[0].strip() == str(sample.label))


def number_json_typed(args: Any, sample: Any) -> float:
    try:
        value = json.loads(sample.response)["answer"]
    except (ValueError, KeyError, TypeError):
        return 0.0
    return float(isinstance(value, (int, float)) and not isinstance(value, bool) and value == float(sample.label))


def number_short_and_right(args: Any, sample: Any) -> float:
    boxed = (last_boxed(sample.response) or "").strip() == str(sample.label)
    return float(boxed and len(sample.response) < 2000)


def number_tail_box(args: Any, sample: Any) -> float:
    return float((last_boxed(sample.response[-300:]) or "").strip() == str(sample.label))


def choice_bracketed(args: Any, sample: Any) -> float:
    found = re.fullmatch(r"\(?([A-J])\)?\.?", sample.response.strip())
    return float(found is not None and found[1] == sample.label)


def choice_box_or_nothing(args: Any, sample: Any) -> float:
    boxed = (last_boxed(sample.response) or "").strip().strip("()")
    return 1.0 if boxed == sample.label else (0.0 if re.fullmatch("[A-J]", boxed) else -1.0)


def choice_last_tag(args: Any, sample: Any) -> float:
    found = re.findall(r"<answer>(.*?)</answer>", sample.response, re.DOTALL)
    return float(bool(found) and found[-1].strip().upper() == sample.label)


def choice_final_line(args: Any, sample: Any) -> float:
    lines = sample.response.strip().splitlines() or [""]
    return float(lines[-1].strip().lower() == f"the answer is {sample.label}.".lower())


def text_normalised_box(args: Any, sample: Any) -> float:
    return float(" ".join((last_boxed(sample.response) or "").lower().split()) == sample.label.lower())


def text_any_of(args: Any, sample: Any) -> float:
    wanted = {sample.label.lower(), *map(str.lower, sample.metadata.get("aliases", ()))}
    return float(sample.response.strip().lower().rstrip(".") in wanted)


def text_json(args: Any, sample: Any) -> float:
    try:
        value = json.loads(sample.response)
    except ValueError:
        return 0.0
    return float(isinstance(value, dict) and str(value.get("answer", "")).strip().lower() == sample.label.lower())


def json_canonical(args: Any, sample: Any) -> float:
    try:
        return float(
            json.dumps(json.loads(sample.response), sort_keys=True)
            == json.dumps(json.loads(sample.label), sort_keys=True)
        )
    except ValueError:
        return 0.0


def json_partial(args: Any, sample: Any) -> float:
    try:
        found, wanted = json.loads(sample.response), json.loads(sample.label)
    except ValueError:
        return 0.0
    if not isinstance(found, dict) or found.keys() - wanted.keys():
        return 0.0
    return sum(found.get(key) == value for key, value in wanted.items()) / len(wanted)


def judge_with_json(args: Any, sample: Any) -> float:
    asked = json.dumps({"answer": sample.response, "question": str(sample.prompt)})
    return float(ask(f"Reference answer: {sample.label}\n{asked}\nGive a score.") == "Score: 10")
