"""Read the tests of a program in the forms that data sets use, and compare outputs.

==============================================================  ===============================================
form of `metadata["tests"]` or the label (JSON text of it, too)  read as
==============================================================  ===============================================
Python text, perhaps with `metadata["entry_point"]`              one test (HumanEval: its `check` is called)
list of Python texts                                             a test each (MBPP)
`{"inputs": [...], "outputs": [...]}`                            stdin and stdout (APPS)
the same with `"fn_name"`                                        calls of that function (APPS)
list of `{"input", "output"[, "testtype"]}`                      the same (LiveCodeBench, `metadata["func_name"]`)
the same with `"type"`                                           the same (SYNTHETIC-1, `"fn_name"` in the cases)
any of these below `"test_cases"` or `"input_output"`            as it (SYNTHETIC-1, TACO)
==============================================================  ===============================================

`metadata["setup"]` (or `test_setup_code`) is run before each Python text. Neither these texts nor expected answers ever
enter the process that runs the program.
"""

from __future__ import annotations

import ast
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from slime_rewards.code.values import read_json


@dataclass(frozen=True)
class Asserts:
    """Python texts that raise when the program is wrong."""

    statements: list[str]

    def __len__(self) -> int:
        return len(self.statements)


@dataclass(frozen=True)
class Calls:
    """Calls of one function, or of the method of a class `Solution`."""

    function: str
    arguments: list[list[Any]]
    expected: list[Any]

    def __len__(self) -> int:
        return len(self.arguments)


@dataclass(frozen=True)
class Programs:
    """Runs of the program as a script."""

    inputs: list[str]
    outputs: list[str]

    def __len__(self) -> int:
        return len(self.inputs)


STDIN, FUNCTIONAL = "stdin", "functional"
_KINDS = {"stdin_stdout": STDIN, "standard_input": STDIN, "function_call": FUNCTIONAL, "call_based": FUNCTIONAL}
"""Other names of the two kinds of cases, in `testtype` or `type` -> LiveCodeBench's."""

Tests = Asserts | Calls | Programs


def read_tests(given: Any, metadata: Mapping[str, Any]) -> Tests:
    """Read the tests. Raises ValueError if they are missing or have an unknown form."""
    if isinstance(given, str):
        given = _from_json(given)
    tests = _read(given, metadata)
    if not len(tests):
        raise ValueError("the sample has no tests; metadata['tests'] or the label holds them")
    return tests


def _read(given: Any, metadata: Mapping[str, Any]) -> Tests:
    if given is None or given == "":
        return Asserts([])
    if isinstance(given, str):
        entry = metadata.get("entry_point")
        given = [f"{given}\ncheck({entry})\n" if entry and "def check(" in given else given]
    for key in ("test_cases", "input_output"):
        if isinstance(given, Mapping) and given.get(key):
            return read_tests(given[key], metadata)
    if isinstance(given, Mapping):
        inputs, outputs = given.get("inputs"), given.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("tests as a mapping need 'inputs' and 'outputs', lists of the same length")
        function = given.get("fn_name") or metadata.get("func_name")
        if function:
            return Calls(str(function), [_arguments(x) for x in inputs], list(outputs))
        return Programs([_text(x) for x in inputs], [_text(x) for x in outputs])
    if isinstance(given, Sequence) and all(isinstance(x, str) for x in given):
        for text in given:
            _check_python(text)
        setup = metadata.get("setup") or metadata.get("test_setup_code") or ""
        return Asserts([f"{setup}\n{text}" if setup else text for text in given])
    if isinstance(given, Sequence) and all(isinstance(x, Mapping) and {"input", "output"} <= x.keys() for x in given):
        return _cases(given, metadata)
    raise ValueError(
        "tests must be Python text, a list of them, {'inputs', 'outputs'[, 'fn_name']}"
        f" or a list of {{'input', 'output'}}; got {type(given).__name__}: {given!r:.80}"
    )


def _check_python(text: str) -> None:
    """Raise ValueError for a text that no program fails: it calls, asserts and raises nothing, or is no Python.

    What it only defines in functions does not run.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"a test is no Python text: {text!r:.80}: {error}") from None
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        if isinstance(node, ast.Assert | ast.Raise | ast.Call):
            return
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)
    raise ValueError(f"a test asserts nothing, so that every program passes: {text!r:.80}")


def _cases(given: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> Tests:
    kinds = {_KINDS.get(kind := str(case.get("testtype") or case.get("type") or STDIN), kind) for case in given}
    if kinds == {STDIN} or not kinds:
        return Programs([_text(case["input"]) for case in given], [_text(case["output"]) for case in given])
    named = {str(case.get("fn_name") or case.get("func_name") or "") for case in given} - {""}
    function = named.pop() if len(named) == 1 else metadata.get("func_name") or metadata.get("fn_name")
    if kinds != {FUNCTIONAL} or not function or named:
        raise ValueError(
            "tests with testtype or type must all be 'stdin', or all 'functional' ('function_call') with one function's"
            f" name in metadata['func_name'] or their 'fn_name'; got {', '.join(sorted(kinds))}"
        )
    arguments, expected = zip(*[_call_case(case["input"], case["output"]) for case in given])
    return Calls(str(function), list(arguments), list(expected))


def _call_case(given: Any, expected: Any) -> tuple[list[Any], Any]:
    """Return arguments and expected value: as they are, or JSON in text, an argument on each line (LiveCodeBench)."""
    if not isinstance(given, str):
        return _arguments(given), expected
    arguments = [_from_line(line) for line in given.split("\n") if line.strip()]
    return arguments, _from_line(expected) if isinstance(expected, str) else expected


def _from_line(text: str) -> Any:
    try:
        return read_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a test of a function has input or output that is no JSON: {text!r:.80}: {error}") from None


def _from_json(text: str) -> Any:
    """Return the value of JSON text, or of the Python text of a list of tests; else the text, which is a test."""
    if text.lstrip()[:1] not in ("[", "{"):
        return text
    for read in (read_json, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(text.strip())
    return text


def _arguments(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _text(value: Any) -> str:
    """Return the text of a test; some APPS tests are a list of lines."""
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    return format(Decimal(value), "f") if type(value) is int else str(value)  # str() limits digits


def same_output(found: str, expected: str) -> bool:
    """Return whether lines are equal without trailing blanks, or tokens are, with numbers within relative 1e-6."""
    lines = [[line.rstrip() for line in text.rstrip().split("\n")] for text in (found, expected)]
    if lines[0] == lines[1]:
        return True
    if len(lines[0]) != len(lines[1]):
        return False
    tokens = [[line.split() for line in side] for side in lines]
    return all(len(a) == len(b) and all(_same_token(x, y) for x, y in zip(a, b)) for a, b in zip(tokens[0], tokens[1]))


def _same_token(found: str, expected: str) -> bool:
    if found == expected:
        return True
    if len(found) > 100 or len(expected) > 100 or "." not in found + expected:
        return False
    try:
        a, b = Decimal(found), Decimal(expected)
        return a.is_finite() and b.is_finite() and abs(a - b) <= Decimal("1e-6") * max(Decimal(1), abs(b))
    except InvalidOperation:
        return False


def same_value(found: Any, expected: Any) -> bool:
    """Return whether values are equal as JSON; an expected single value may be in a list of one, as in APPS."""
    if _equal(found, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _equal(found, expected[0])


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, float) or isinstance(expected, float):
        if not isinstance(found, (int, float)) or not isinstance(expected, (int, float)):
            return False
        try:
            return found == expected or abs(found - expected) <= 1e-6 * max(1.0, abs(expected)) < math.inf
        except OverflowError:  # an integer beyond the range of a float
            return False
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(_equal(a, b) for a, b in zip(found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_equal(found[k], expected[k]) for k in found)
    return type(found) is type(expected) and bool(found == expected)
