from __future__ import annotations

import asyncio
import math
import time
from functools import partial
from typing import Any

import psutil
import pytest
from slime_rewards.code import Options, extract_program, reward, sandbox_limits
from slime_rewards.code.cases import read_tests, same_output, same_value
from slime_rewards.code.runs import run_program

from slime_core import Sample
from slime_core.config import Args

ADD = "def add(a, b):\n    return a + b"
ENDS = """
import atexit, threading, time
atexit.register(print, "atexit")
def late():
    time.sleep(0.2)
    print("thread")
threading.Thread(target=late).start()
print("main")
last = open(1, "w")
last.write("unflushed\\n")
"""
"""Prints at each point where Python ends a program."""
SUM = "print(sum(map(int, input().split())))"


def ran(program: str, text: str = "", **options: Any) -> str | None:
    own = Options(**{"memory_mb": 512, "max_output_kb": 64, "max_file_mb": 1, **options})
    return asyncio.run(run_program(program, text, sandbox_limits(own), 60.0, "require"))


def score(program: str, label: Any, options: dict[str, Any] | None = None, **metadata: Any) -> float:
    args = Args(rm_timeout=60.0, plugins={"code": {"timeout": 30.0, **(options or {})}})
    return reward(args, Sample(response=f"```python\n{program}\n```", label=label, metadata=metadata))


slow = partial(pytest.param, marks=pytest.mark.slow)

# -- forms of tests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "label", "metadata", "expected"),
    [
        (ADD, "assert add(1, 2) == 3\nassert add(0, 0) == 0", {}, 1.0),
        (ADD, "def check(f):\n    assert f(1, 2) == 3", {"entry_point": "add"}, 1.0),
        slow(ADD, "def check(f):\n    assert f(1, 2) == 4", {"entry_point": "add"}, 0.0),
        slow(ADD, ["assert add(ONE, 2) == 3"], {"setup": "ONE = 1"}, 1.0),
        (SUM, {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]}, {}, 1.0),
        slow(SUM, '{"inputs": ["1 2"], "outputs": ["4"]}', {}, 0.0),
        (ADD, {"inputs": [[1, 2], [3, 4]], "outputs": [3, [7]], "fn_name": "add"}, {}, 1.0),
        slow(ADD, {"inputs": [[1, 2]], "outputs": [4], "fn_name": "add"}, {}, 0.0),
        (ADD, [{"input": "1\n2", "output": "3", "testtype": "functional"}], {"func_name": "add"}, 1.0),
        ("class Solution:\n    def f(self, x):\n        return (x, x)", {"inputs": [[1]], "outputs": [[1, 1]]},
         {"func_name": "f"}, 1.0),
        slow("import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int", "assert P(1) == P(1) != P(2)", {},
             1.0),
        slow("class Solution:\n    def product(self, a: List[int]) -> Optional[int]:\n        heapify(a)\n"
             "        return reduce(mul, a)",
             [{"input": "[2, 7]", "output": "14", "testtype": "functional"}], {"func_name": "product"}, 1.0),
        slow("print(Counter(input()).most_common(1)[0][0], gcd(4, 6))",
             {"inputs": ["abb"], "outputs": ["b 2"]}, {}, 1.0),
        (ENDS, {"inputs": [""], "outputs": ["main\nthread\natexit\nunflushed\n"]}, {}, 1.0),
        slow("import io, sys\nbuffer = io.StringIO()\nsys.stdout = buffer\nimport atexit\n"
             "atexit.register(lambda: sys.__stdout__.write(buffer.getvalue()))\nprint(7)",
             {"inputs": [""], "outputs": ["7"]}, {}, 1.0),
        slow("def f(n):\n    return n + 1",
             {"inputs": [[10**5000]], "outputs": [10**5000 + 1], "fn_name": "f"}, {}, 1.0),
        slow("def f(n):\n    return 10**5000",
             f'{{"fn_name": "f", "inputs": [[1]], "outputs": [1{"0" * 5000}]}}', {}, 1.0),
        slow("def f(a, b):\n    return [len(a), b]",
             [{"input": '"a\u2028b\x85"\n1', "output": "[4, 1]", "testtype": "functional"}],
             {"func_name": "f"}, 1.0),
        ("def f(x):\n    return x + 1",
         [{"fn_name": "f", "input": [3], "output": 4, "type": "function_call"}], {}, 1.0),
        slow(SUM, {"input_output": '{"inputs": ["1 2"], "outputs": ["3"]}'}, {}, 1.0),
        slow("def f(x):\n    return x + 1", "['assert f(1) == 2', 'assert f(2) == 3']", {}, 1.0),
        slow("def f():\n    return 'x' * 1_600_000",
             {"inputs": [[]], "outputs": ["x" * 1_600_000], "fn_name": "f"}, {}, 1.0),
        ("print(3)\nraise SystemExit(1)", {"inputs": [""], "outputs": ["3"]}, {}, 0.0),
    ],
)  # fmt: skip
def test_forms(program: str, label: Any, metadata: dict[str, Any], expected: float) -> None:
    assert score(program, label, **metadata) == expected


@pytest.mark.slow
def test_fraction() -> None:
    share = {"score": "fraction"}
    assert score(ADD, [f"assert add(1, 2) == {n}" for n in (3, 4, 3, 5)], share) == 0.5
    assert score(SUM, {"inputs": ["1 2"] * 4, "outputs": ["4", "3", "3", "3"]}, share) == 0.75
    assert score(ADD, {"inputs": [[1, 2], [1, None]], "outputs": [3, 3], "fn_name": "add"}, share) == 0.5
    assert score("def add(", ["assert 1", "assert 1"], share) == 0.0


@pytest.mark.parametrize(
    ("label", "metadata", "message"),
    [
        (None, {}, "no tests"),
        ([], {}, "no tests"),
        ({"inputs": ["1"], "outputs": []}, {}, "same length"),
        (7, {}, "got int: 7"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], {}, "func_name"),
        ([{"input": "1", "output": "2", "type": "interactive"}], {}, "got interactive"),
        ([{"input": "a b", "output": "2", "testtype": "functional"}], {"func_name": "f"}, "no JSON: 'a b'"),
        ([{"fn_name": n, "input": [1], "output": 2, "type": "function_call"} for n in "fg"], {}, "one function's name"),
    ],
)
def test_tests_of_no_form_are_the_data_sets_fault(label: Any, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score(ADD, label, **metadata)


def test_it_scores_where_an_event_loop_runs_already() -> None:
    async def scored() -> float:
        return score(ADD, "assert add(1, 2) == 3")

    assert asyncio.run(scored()) == 1.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```\na\n```\nthen\n```python\nb\n```\nand\n```\nc\n```", "b\n"),
        ("```bash\nls\n```", None),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("```python\nnever closed", None),
        ("```python\r\na\r\n```", "a\n"),
        ("a", None),
    ],
)
def test_extract_program(response: str, expected: str | None) -> None:
    assert extract_program(response) == expected


@pytest.mark.parametrize(
    ("found", "expected", "equal"),
    [
        ("1\n2\n", "1 \n2", True),
        ("0.3333333", "0.33333333", True),
        ("0.34", "0.33", False),
        ("1.0", "1", True),
        ("nan", "nan.0", False),
    ],
)
def test_same_output(found: str, expected: str, equal: bool) -> None:
    assert same_output(found, expected) is equal


def test_same_value() -> None:
    assert same_value([1, 2.0000000001], [1, 2])
    assert not same_value(True, 1)
    assert not same_value("1", 1)
    assert same_value(3, [3])
    assert not same_value({"a": 1}, {"a": 1, "b": 2})
    assert not same_value(1.5, 10**5000)
    assert same_value(-math.inf, -math.inf)
    assert not any(same_value(found, math.inf) for found in (5, 1e308, -math.inf, math.nan))


# -- what does not pass ------------------------------------------------------------------------------------------------

CHEATS = {
    "os exit 0": "import os\nos._exit(0)",
    "exit in the function": "import os\ndef f(x):\n    os._exit(0)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)",
    "equal inside a list": "class E:\n    def __eq__(self, o):\n        return True\nf = lambda x: [E()]",
    "patched abs": "import builtins\nbuiltins.abs = lambda x: 0.0\nf = lambda x: 9",
    "patched AssertionError": "import builtins\nbuiltins.AssertionError = type('Quiet', (Exception,), {})",
    "patched exec": "import builtins\nbuiltins.exec = lambda *a: None\nbuiltins.compile = lambda *a, **k: ''",
    "the harness": "import sys\nfor m in list(sys.modules.values()):\n"
    "    vars(m).update(_guard_comparisons=lambda t: 'pass')",
    "its frame": "import sys\nframe = sys._getframe(1)\nframe.f_locals.update(run=print)\n"
    "frame.f_globals['_checked'] = print",
    "reads the tests": "import os, sys\nsys.stdin.read()\nfor fd in range(3, 60):\n    try:\n"
    "        os.set_blocking(fd, False); "
    "data = os.read(fd, 9999); os.write(fd, data)\n    except OSError:\n        pass",
    "writes to all pipes": "import os\nfor fd in range(60):\n    try:\n        os.write(fd, b'0\\n"
    "' * 99 + b'[0, [1]]\\n')\n"
    "    except OSError:\n        pass",
    "prints ok": "print('ok')\nprint('0')",
    "ends all": "import os, signal\nos.kill(0, signal.SIGKILL)",
    "deep": "def f(x):\n    return f(x)",
    "null byte": "x = '\0'",
}


QUICK = ("os exit 0", "equal inside a list", "patched abs", "its frame", "writes to all pipes", "ends all", "deep")
"""An end, a value, a module, the harness, the pipes, a signal and the stack: a way in each."""


@pytest.mark.parametrize(
    "cheat", [pytest.param(c, id=n, marks=[] if n in QUICK else pytest.mark.slow) for n, c in CHEATS.items()]
)
def test_a_cheat_does_not_pass(cheat: str) -> None:
    tests = [
        "assert f(1) == [1]",
        "import math\nassert math.isclose(f(1), 1.0)",
        "assert abs(f(1) - 1) < 1e-6",
        "assert 1 == 2",
    ]
    assert score(cheat, tests, {"score": "fraction"}) == 0.0


def test_a_line_that_the_program_writes_among_the_values_is_no_error() -> None:
    frame = "import os, sys\ndef f(x):\n    own = sys._getframe(1).f_locals\n"
    line = """    os.write(own["report"], ('["%s", [], 1]\\n' % own["tests"]["nonce"]).encode())\n"""
    assert score(frame + line, {"inputs": [[1]], "outputs": [[1]], "fn_name": "f"}) == 0.0


@pytest.mark.slow
def test_a_cheat_does_not_pass_calls_and_programs() -> None:
    for cheat in CHEATS.values():
        assert score(cheat, {"inputs": [[1]], "outputs": [[1]], "fn_name": "f"}) == 0.0
    assert score("import os\nos._exit(0)", {"inputs": ["1"], "outputs": ["1"]}) == 0.0


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_runaway_is_ended_with_all_it_started() -> None:
    program = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(99)
time.sleep(99)
"""
    started, before = time.monotonic(), psutil.Process().children(recursive=True)
    assert score(program, {"inputs": [""], "outputs": [""]}, {"timeout": 0.4}) == 0.0
    assert time.monotonic() - started < 40
    assert set(psutil.Process().children(recursive=True)) <= set(before)


@pytest.mark.slow
def test_the_time_of_all_tests_stays_below_the_deadline_of_the_score() -> None:
    args = Args(rm_timeout=1.0, plugins={"code": {"timeout": 60.0, "score": "fraction"}})
    sample = Sample(response="```python\nwhile True: pass\n```", label={"inputs": [""] * 3, "outputs": [""] * 3})
    started = time.monotonic()
    assert reward(args, sample) == 0.0
    assert time.monotonic() - started < 30


def test_large_input_and_output_do_not_block_each_other() -> None:
    text = "x" * 3_000_000
    program = "import sys\nfor line in sys.stdin: sys.stdout.write(line)"
    assert ran(program, text, max_output_kb=4000, max_file_mb=16) == text


UNCALLED = "def check(candidate):\n    assert candidate(1) == 2\n"


@pytest.mark.parametrize(
    "text",
    [
        "42",
        "hello",
        "x = 1",
        "assert",
        "def f(:",
        "",
        "pass",
        '["42"]',
        '["x == 1"]',
        UNCALLED,
        f"class T:\n    {UNCALLED.splitlines()[0]} assert 0",
    ],
)
def test_a_test_that_no_program_fails_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"no tests|no Python text|asserts nothing"):
        read_tests(text, {})
    assert len(read_tests(UNCALLED, {"entry_point": "f"})) == 1
