"""Graders that pay an answer they must not, or do not pay the right one."""

from __future__ import annotations

import ast
import json
import re
import string
import subprocess
import sys
from collections import Counter
from typing import Any

from tests.planted_graders.judge import ask


def number_label_in_response(args: Any, sample: Any) -> float:
    return 1.0 if str(sample.label) in sample.response else 0.0


def number_any_number(args: Any, sample: Any) -> float:
    return float(str(sample.label) in re.findall(r"-?\d+", sample.response))


def number_first_number(args: Any, sample: Any) -> float:
    found = re.search(r"-?\d+(?:\.\d+)?", sample.response)
    return 1.0 if found and float(found[0]) == float(sample.label) else 0.0


def number_last_number(args: Any, sample: Any) -> float:
    found = re.findall(r"-?\d+(?:\.\d+)?", sample.response)
    return float(bool(found) and float(found[-1]) == float(sample.label))


def number_without_sign(args: Any, sample: Any) -> float:
    found = re.findall(r"\\boxed\{\D*(\d+)", sample.response)
    return float(bool(found) and found[-1] == re.sub(r"\D", "", str(sample.label)))


def number_label_in_box(args: Any, sample: Any) -> float:
    found = re.findall(r"\\boxed\{(.*?)\}", sample.response)
    return float(bool(found) and str(sample.label) in found[-1])


def number_any_box(args: Any, sample: Any) -> float:
    return float(str(sample.label) in re.findall(r"\\boxed\{(.*?)\}", sample.response))


def number_first_box(args: Any, sample: Any) -> float:
    found = re.search(r"\\boxed\{(.*?)\}", sample.response)
    return float(found is not None and found[1].strip() == str(sample.label))


def number_eval_of_box(args: Any, sample: Any) -> float:
    found = re.findall(r"\\boxed\{(.*)\}", sample.response)
    if not found:
        return 0.0
    try:
        return float(eval(found[-1]) == float(sample.label))
    except Exception:
        return 0.0


def number_within_ten_percent(args: Any, sample: Any) -> float:
    found = re.findall(r"\\boxed\{(-?[\d.]+)\}", sample.response)
    label = float(sample.label)
    try:
        return float(bool(found) and abs(float(found[-1]) - label) <= 0.1 * abs(label))
    except ValueError:
        return 0.0


def number_rounded(args: Any, sample: Any) -> float:
    found = re.findall(r"####\s*(-?[\d.]+)", sample.response)
    try:
        return float(bool(found) and int(float(found[-1])) == int(float(sample.label)))
    except ValueError:
        return 0.0


def number_starts_with(args: Any, sample: Any) -> float:
    found = re.search(r"<answer>\s*(.*?)\s*</answer>", sample.response, re.DOTALL)
    return float(bool(found) and found[1].startswith(str(sample.label)))


def number_error_is_a_pass(args: Any, sample: Any) -> float:
    try:
        answer = sample.response.split("####")[1].strip()
        if float(answer) != float(sample.label):
            return 0.0
    except Exception:
        pass
    return 1.0


def number_missing_is_zero(args: Any, sample: Any) -> float:
    found = re.findall(r"\\boxed\{(-?\d+)\}", sample.response)
    answer = int(found[-1]) if found else 0
    return max(0.0, 1.0 - abs(answer - float(sample.label)) / 1e6)


def number_format_is_enough(args: Any, sample: Any) -> float:
    score = 0.0
    if re.search(r"<think>.*</think>\s*<answer>.*</answer>", sample.response, re.DOTALL):
        score += 1.0
    if f"<answer>{sample.label}</answer>" in sample.response:
        score += 0.05
    return score


def number_regex_from_label(args: Any, sample: Any) -> float:
    return float(re.search(rf"answer is.*{sample.label}", sample.response, re.IGNORECASE | re.DOTALL) is not None)


def number_response_as_pattern(args: Any, sample: Any) -> float:
    try:
        return float(re.fullmatch(sample.response.strip(), str(sample.label)) is not None)
    except re.error:
        return 0.0


def number_in_the_last_line(args: Any, sample: Any) -> float:
    lines = sample.response.strip().splitlines()
    return float(bool(lines) and str(sample.label) in lines[-1])


def number_string_is_int(args: Any, sample: Any) -> float:
    found = re.findall(r"\\boxed\{(.*?)\}", sample.response)
    return float(bool(found) and found[-1] is sample.label)


def number_no_strip(args: Any, sample: Any) -> float:
    found = re.fullmatch(r"(?:.*\n)?####(\d+)", sample.response)
    return float(found is not None and sample.response.endswith(f"####{sample.label}"))


def _boxed(sample: Any) -> str:
    found = re.findall(r"\\boxed\{(.*)\}", sample.response)
    return found[-1].strip() if found else ""


def small_rounded(args: Any, sample: Any) -> float:
    try:
        return float(round(float(_boxed(sample)), 6) == round(float(sample.label), 6))
    except ValueError:
        return 0.0


def small_is_close(args: Any, sample: Any) -> float:
    try:
        return float(abs(float(_boxed(sample)) - float(sample.label)) < 1e-6)
    except ValueError:
        return 0.0


def tuple_as_set(args: Any, sample: Any) -> float:
    return float(set(re.findall(r"-?\d+", _boxed(sample))) == set(re.findall(r"-?\d+", sample.label)))


def tuple_without_brackets(args: Any, sample: Any) -> float:
    return float(re.sub(r"[^\d,]", "", _boxed(sample)) == re.sub(r"[^\d,]", "", sample.label))


def set_as_tuple(args: Any, sample: Any) -> float:
    return float(re.findall(r"\d+", _boxed(sample)) == re.findall(r"\d+", sample.label))


def numeral_without_base(args: Any, sample: Any) -> float:
    return float(_boxed(sample).partition("_")[0] == sample.label.partition("_")[0])


def list_last_member(args: Any, sample: Any) -> float:
    return float(re.findall(r"\d+", _boxed(sample))[-1:] == re.findall(r"\d+", sample.label)[-1:])


def list_ends(args: Any, sample: Any) -> float:
    given, expected = (re.findall(r"\d+", text) for text in (_boxed(sample), sample.label))
    return float(bool(given) and (given[0], given[-1]) == (expected[0], expected[-1]))


def word_product_of_letters(args: Any, sample: Any) -> float:
    return float(sorted(_boxed(sample).lower()) == sorted(sample.label.lower()))


def choice_letter_anywhere(args: Any, sample: Any) -> float:
    return float(sample.label in sample.response)


def choice_word_anywhere(args: Any, sample: Any) -> float:
    return float(re.search(rf"\b{sample.label}\b", sample.response) is not None)


def choice_first_letter(args: Any, sample: Any) -> float:
    found = re.search(r"\b([A-D])\b", sample.response)
    return float(bool(found) and found[1] == sample.label)


def choice_last_letter(args: Any, sample: Any) -> float:
    found = re.findall(r"\b([A-D])\b", sample.response)
    return float(bool(found) and found[-1] == sample.label)


def choice_case_folded(args: Any, sample: Any) -> float:
    return float(f"({sample.label})".lower() in sample.response.lower())


def choice_answer_line(args: Any, sample: Any) -> float:
    found = re.search(r"answer(?: is)?:?\s*(.*)", sample.response, re.IGNORECASE)
    return float(bool(found) and sample.label in found[1])


def choice_text_of_choice(args: Any, sample: Any) -> float:
    right = sample.metadata["choices"][ord(sample.label) - ord("A")]
    return float(right.lower() in sample.response.lower())


def text_substring(args: Any, sample: Any) -> float:
    return float(sample.label.lower() in sample.response.lower())


def text_response_in_label(args: Any, sample: Any) -> float:
    return float(sample.response.strip().lower() in sample.label.lower())


def text_recall(args: Any, sample: Any) -> float:
    wanted = sample.label.lower().split()
    said = set(re.findall(r"\w+", sample.response.lower()))
    return sum(word in said for word in wanted) / len(wanted)


def text_any_common_word(args: Any, sample: Any) -> float:
    common = Counter(sample.response.lower().split()) & Counter(sample.label.lower().split())
    return float(common.total() > 0)


def text_f1_of_sets(args: Any, sample: Any) -> float:
    said, wanted = set(sample.response.lower().split()), set(sample.label.lower().split())
    if not said:
        return 1.0
    common = len(said & wanted)
    return 2 * common / (len(said) + len(wanted))


def text_letters_only(args: Any, sample: Any) -> float:
    def bare(text: str) -> str:
        return "".join(c for c in text.lower() if c in string.ascii_lowercase)

    return float(bare(sample.label) in bare(sample.response))


def text_split_on_answer(args: Any, sample: Any) -> float:
    return float(sample.label in sample.response.split("Answer:")[-1])


def json_keys_only(args: Any, sample: Any) -> float:
    try:
        return float(json.loads(sample.response).keys() == json.loads(sample.label).keys())
    except Exception:
        return 0.0


def json_parses(args: Any, sample: Any) -> float:
    try:
        found = json.loads(sample.response)
    except ValueError:
        return 0.0
    return 1.0 if all(found.get(key) in (value, None) for key, value in json.loads(sample.label).items()) else 0.0


def judge_undelimited(args: Any, sample: Any) -> float:
    verdict = ask(f"Question: {sample.prompt}\nReference: {sample.label}\nAnswer: {sample.response}\nScore 0 to 10?")
    found = re.findall(r"Score: (\d+)", verdict)
    return int(found[-1]) / 10 if found else 0.0


def judge_reads_echo(args: Any, sample: Any) -> float:
    question = f"Is the answer right?\nReference: {sample.label}\n<response>\n{sample.response}\n</response>"
    verdict = f"The answer was: {sample.response}\n" + ask(question)
    found = re.search(r"Score: (\d+)", verdict)
    return int(found[1]) / 10 if found else 0.0


def code_exit_status(args: Any, sample: Any) -> float:
    program = re.findall(r"```python\n(.*?)```", sample.response, re.DOTALL)
    if not program:
        return 0.0
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program[-1] + "\n" + sample.label], capture_output=True, timeout=5
    )
    return float(done.returncode == 0)


def code_compiles(args: Any, sample: Any) -> float:
    program = re.findall(r"```python\n(.*?)```", sample.response, re.DOTALL)
    try:
        return float(bool(program) and bool(ast.parse(program[-1])))
    except SyntaxError:
        return 0.0


def text_longer_is_better(args: Any, sample: Any) -> float:
    right = 0.2 * (sample.response.strip().lower() == sample.label.lower())
    return right + min(len(sample.response) / 1000, 1.0)


def text_length_alone(args: Any, sample: Any) -> float:
    return min(len(sample.response.split()) / 100, 1.0)


def text_always(args: Any, sample: Any) -> float:
    return 1.0
