"""Graders that pay the right answer in a form of theirs, and nothing else."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from fractions import Fraction
from typing import Any

from slime_core import last_boxed
from tests.planted_graders.judge import ask


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", "").strip().rstrip("."))
    except ValueError:
        return None


def number_last_box(args: Any, sample: Any) -> float:
    return float((last_boxed(sample.response) or "").strip() == str(sample.label))


def number_last_box_by_value(args: Any, sample: Any) -> float:
    answer = _number(last_boxed(sample.response) or "")
    return float(answer is not None and answer == float(sample.label))


def number_box_close(args: Any, sample: Any) -> float:
    answer = _number(last_boxed(sample.response) or "")
    return float(answer is not None and abs(answer - float(sample.label)) < 1e-6)


def number_fraction(args: Any, sample: Any) -> float:
    try:
        return float(Fraction(last_boxed(sample.response) or "x") == Fraction(str(sample.label)))
    except (ValueError, ZeroDivisionError):
        return 0.0


def number_gsm8k(args: Any, sample: Any) -> float:
    found = re.findall(r"####\s*(-?[\d,]+(?:\.\d+)?)\s*$", sample.response)
    return float(bool(found) and _number(found[-1]) == float(sample.label))


def number_hashes_to_the_end(args: Any, sample: Any) -> float:
    answer = sample.response.rpartition("####")[2] if "####" in sample.response else ""
    return float(answer.strip() == str(sample.label))


def number_answer_tag(args: Any, sample: Any) -> float:
    found = re.findall(r"<answer>(.*?)</answer>", sample.response, re.DOTALL)
    return float(bool(found) and found[-1].strip() == str(sample.label))


def number_answer_tag_whole(args: Any, sample: Any) -> float:
    found = re.fullmatch(r"\s*<think>.*</think>\s*<answer>([^<]*)</answer>\s*", sample.response, re.DOTALL)
    return float(found is not None and found[1].strip() == str(sample.label))


def number_tag_with_bonus(args: Any, sample: Any) -> float:
    found = re.fullmatch(r"\s*<think>.*</think>\s*<answer>([^<]*)</answer>\s*", sample.response, re.DOTALL)
    if found is None:
        return 0.0
    return 1.0 if _number(found[1]) == float(sample.label) else 0.1


def number_box_minus_one(args: Any, sample: Any) -> float:
    return 1.0 if (last_boxed(sample.response) or "").strip() == str(sample.label) else -1.0


def number_exact(args: Any, sample: Any) -> float:
    return float(sample.response.strip() == str(sample.label))


def number_exact_by_value(args: Any, sample: Any) -> float:
    answer = _number(sample.response)
    return float(answer is not None and answer == float(sample.label))


def number_answer_line(args: Any, sample: Any) -> float:
    found = re.findall(r"^Answer: *(\S+) *$", sample.response, re.MULTILINE)
    return float(bool(found) and found[-1] == str(sample.label))


def number_final_sentence(args: Any, sample: Any) -> float:
    found = re.search(r"The answer is (-?\d+(?:\.\d+)?)\.?\s*\Z", sample.response)
    return float(found is not None and float(found[1]) == float(sample.label))


def number_json(args: Any, sample: Any) -> float:
    try:
        found = json.loads(sample.response)
    except ValueError:
        return 0.0
    return float(isinstance(found, dict) and str(found.get("answer")) == str(sample.label))


def number_box_shorter_is_better(args: Any, sample: Any) -> float:
    right = (last_boxed(sample.response) or "").strip() == str(sample.label)
    return (1.0 - min(len(sample.response), 1000) / 10_000) if right else 0.0


def number_after_thinking(args: Any, sample: Any) -> float:
    if "</think>" not in sample.response:
        return 0.0
    return float((last_boxed(sample.response.rpartition("</think>")[2]) or "").strip() == str(sample.label))


def number_double_brackets(args: Any, sample: Any) -> float:
    found = re.findall(r"\[\[(-?[\d.]+)\]\]", sample.response)
    return float(len(found) == 1 and found[0] == str(sample.label))


def number_one_box_only(args: Any, sample: Any) -> float:
    found = re.findall(r"\\boxed\{([^{}]*)\}", sample.response)
    return float(len(found) == 1 and found[0].strip() == str(sample.label))


def number_closer_is_better(args: Any, sample: Any) -> float:
    answer = _number(last_boxed(sample.response) or "")
    if answer is None or answer != answer or abs(answer) > 1e12:
        return 0.0
    return 1.0 if answer == float(sample.label) else 0.5 / (1.0 + abs(answer - float(sample.label)))


def choice_exact(args: Any, sample: Any) -> float:
    return float(sample.response.strip() == sample.label)


def choice_exact_any_case(args: Any, sample: Any) -> float:
    return float(sample.response.strip().strip("().").upper() == sample.label)


def _same_box(args: Any, sample: Any) -> float:
    return float((last_boxed(sample.response) or "").replace(" ", "") == sample.label.replace(" ", ""))


def small_exact(args: Any, sample: Any) -> float:
    answer = _number(last_boxed(sample.response) or "")
    return float(answer is not None and answer == _number(sample.label))


tuple_box = set_box = numeral_box = list_box = word_box = _same_box


def choice_box(args: Any, sample: Any) -> float:
    return float((last_boxed(sample.response) or "").strip().upper() == sample.label)


def choice_last_line(args: Any, sample: Any) -> float:
    lines = sample.response.strip().splitlines() or [""]
    found = re.fullmatch(r"(?:Final )?[Aa]nswer: \(?([A-J])\)?\.?", lines[-1].strip())
    return float(found is not None and found[1] == sample.label)


def choice_tag(args: Any, sample: Any) -> float:
    found = re.findall(r"<answer>\s*([A-Z])\s*</answer>", sample.response)
    return float(len(set(found)) == 1 and found[0] == sample.label)


def choice_tag_with_bonus(args: Any, sample: Any) -> float:
    found = re.findall(r"<answer>(.*?)</answer>", sample.response, re.DOTALL)
    return 0.2 * float(len(found) == 1) + 0.8 * float(len(found) == 1 and found[0].strip() == sample.label)


def choice_json(args: Any, sample: Any) -> float:
    try:
        found = json.loads(sample.response)
    except ValueError:
        return 0.0
    return float(isinstance(found, dict) and found.get("answer") == sample.label)


def choice_end_of_response(args: Any, sample: Any) -> float:
    found = re.search(r"[Tt]he answer is \(?([A-J])\)?\.?\s*\Z", sample.response)
    return float(found is not None and found[1] == sample.label)


def text_exact(args: Any, sample: Any) -> float:
    return float(sample.response.strip().lower() == sample.label.lower())


def text_exact_normalised(args: Any, sample: Any) -> float:
    def bare(text: str) -> str:
        return " ".join(re.sub(r"[^\w\s]", "", text.lower()).split())

    return float(bare(sample.response) == bare(sample.label))


def text_tag(args: Any, sample: Any) -> float:
    found = re.findall(r"<answer>(.*?)</answer>", sample.response, re.DOTALL)
    return float(bool(found) and found[-1].strip().lower() == sample.label.lower())


def text_box(args: Any, sample: Any) -> float:
    return float((last_boxed(sample.response) or "").strip().lower() == sample.label.lower())


def text_search_r1(args: Any, sample: Any) -> float:
    found = re.findall(r"<answer>(.*?)</answer>", sample.response, re.DOTALL)

    def bare(text: str) -> str:
        return " ".join(word for word in re.sub(r"[^\w\s]", "", text.lower()).split() if word not in ("a", "an", "the"))

    return float(bool(found) and bare(found[-1]) == bare(sample.label))


def text_answer_line(args: Any, sample: Any) -> float:
    found = re.findall(r"^Answer: *(.+?) *$", sample.response, re.MULTILINE)
    return float(bool(found) and found[-1] == sample.label)


def text_sentence(args: Any, sample: Any) -> float:
    lines = sample.response.strip().splitlines() or [""]
    return float(lines[-1].strip().rstrip(".").lower() == f"the answer is {sample.label}".lower())


def json_equal(args: Any, sample: Any) -> float:
    try:
        return float(json.loads(sample.response) == json.loads(sample.label))
    except ValueError:
        return 0.0


def json_fenced(args: Any, sample: Any) -> float:
    found = re.findall(r"```json\n(.*?)```", sample.response, re.DOTALL)
    try:
        return float(bool(found) and json.loads(found[-1]) == json.loads(sample.label))
    except ValueError:
        return 0.0


def judge_fenced(args: Any, sample: Any) -> float:
    mark = "-----" + hashlib.blake2b(sample.response.encode("utf-8", "replace"), digest_size=8).hexdigest()
    verdict = ask(f"Judge the answer.\nReference: {sample.label}\n{mark}\n{sample.response}\n{mark}\nScore 0 to 10?")
    found = re.findall(r"Score: (\d+)", verdict)
    return min(int(found[-1]), 10) / 10 if found else 0.0


def judge_json(args: Any, sample: Any) -> float:
    verdict = ask(f"Reference: {sample.label}\n{json.dumps({'answer': sample.response})}\nScore 0 to 10?")
    return 1.0 if verdict.endswith("Score: 10") else 0.0


def code_values_compared_outside(args: Any, sample: Any) -> float:
    program = re.findall(r"```python\n(.*?)```", sample.response, re.DOTALL)
    if not program:
        return 0.0
    calls = sample.metadata["calls"]
    ask_for = f"\nimport json\nprint('\\n' + json.dumps([{', '.join(calls)}]))"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program[-1] + ask_for], capture_output=True, timeout=5, text=True
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return 0.0
    return float(done.returncode == 0 and found == sample.metadata["values"])
