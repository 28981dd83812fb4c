"""Python texts as tests: what they may do with a program that runs in another process, and what that one cannot."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
import slime_rewards.code.runs as runs
from slime_rewards.code import reward

from slime_core import Sample
from slime_core.config import Args


def share(program: str, tests: list[str], seconds: float = 30.0) -> float:
    args = Args(rm_timeout=60.0, plugins={"code": {"timeout": seconds, "score": "fraction"}})
    return reward(args, Sample(response=f"```python\n{program}\n```", label=tests))


HONEST = {
    "in place": (
        "def f(rows):\n    rows[0][0] = 9\n    rows.append([1])",
        "a = [[1]]\nf(a)\nassert a == [[9], [1]]",
    ),
    "name of a built-in": ("def sum(a, b):\n    return a + b", "assert sum(10, 15) == 25"),
    "modules and helpers": (
        "import math\ndef f(x):\n    return x / 3\ndef half(x):\n    return x / 2",
        "assert math.isclose(f(1), 1 / 3) and abs(f(half(2)) - 1 / 3) < 1e-9",
    ),
    "exceptions": (
        """
class Bad(ValueError):
    def __init__(self, code):
        super().__init__("no")
        self.code = code
def f(x):
    raise Bad(x)
""",
        """
for kind in (Bad, ValueError):
    try:
        f(7)
    except kind as error:
        assert str(error) == "no" and error.code == 7
    else:
        assert False
""",
    ),
    "unittest": (
        "def f(x):\n    return [][x]",
        """
import unittest
class T(unittest.TestCase):
    def test(self):
        with self.assertRaises(IndexError):
            f(3)
r = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))
assert r.wasSuccessful() and r.testsRun == 1
""",
    ),
    "objects": (
        """
class Stack:
    def __init__(self, *items):
        self.items = list(items)
    def push(self, x):
        self.items.append(x)
    def __len__(self):
        return len(self.items)
    def __iter__(self):
        return iter(self.items)
    def __getitem__(self, i):
        return self.items[i]
    def __repr__(self):
        return "S"
    def __add__(self, other):
        return Stack(*self.items, *other.items)
    def __eq__(self, other):
        return self.items == other.items
    def __lt__(self, other):
        return len(self) < len(other)
""",
        """
s = Stack()
s.push(3)
assert len(s) == 1 and list(s) == [3] and s[0] == 3 and 3 in s and repr(s) == "S"
assert (s + s).items == [3, 3] and s < s + s and s == s and s != s + s and isinstance(s, Stack)
s.items = [4]
assert s.items == [4] and bool(s) and not isinstance(3, Stack) and hasattr(s, "push") and not hasattr(s, "pop")
""",
    ),
    "values": (
        """
import collections, decimal, enum, fractions
P = collections.namedtuple("P", "x y")
class E(enum.IntEnum):
    A = 1
def f():
    return {(1, 2): {3}, None: b"x", 2.5: [1j, 10**5000, float("inf")], "u\\ud800": frozenset("a")}
def g():
    return collections.Counter("aab"), collections.deque([1]), decimal.Decimal("1.5"), fractions.Fraction(1, 3)
def h():
    yield from range(3)
def i():
    return collections.defaultdict(int, a=1), range(3), int
""",
        """
import collections, decimal, fractions
assert f() == {(1, 2): {3}, None: b"x", 2.5: [1j, 10**5000, float("inf")], "u\\ud800": frozenset("a")}
assert g() == (collections.Counter("aab"), collections.deque([1]), decimal.Decimal("1.5"), fractions.Fraction(1, 3))
assert list(h()) == [0, 1, 2] and next(h()) == 0
assert i() == ({"a": 1}, range(3), int) and isinstance(g()[0], collections.Counter)
assert P(1, 2) == (1, 2) and P(1, 2).y == 2 and E.A == 1 and E.A is E.A and E.A.name == "A"
""",
    ),
    "functions of the tests": (
        "def f(g, xs):\n    return [g(x) for x in xs]",
        """
import operator
assert f(lambda x: x + 1, [1, 2]) == [2, 3] and f(len, ["ab"]) == [2] and f(operator.neg, [1]) == [-1]
assert f(f(lambda x: (lambda y: (x, y)), [1])[0], [2]) == [(1, 2)]
""",
    ),
    "objects of the tests": (
        "def f(node):\n    node.val = 5\n    return node.next.val if node.next else node",
        """
class Node:
    def __init__(self, val, next=None):
        self.val, self.next = val, next
n = Node(1)
assert f(Node(0, n)) == 1 and f(n) is n and n.val == 5
""",
    ),
}


def quick(cases: Mapping[str, Any], *names: str) -> list[Any]:
    """Each case starts a sandbox: these ways in are the quick ones, which no other shares."""
    return [
        pytest.param(case, id=name, marks=[] if name in names else pytest.mark.slow) for name, case in cases.items()
    ]


@pytest.mark.parametrize("case", quick(HONEST, "unittest", "objects", "values", "functions of the tests"))
def test_what_a_test_may_do_with_a_program(case: tuple[str, str]) -> None:
    program, test = case
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(program, names)
    exec(test, names)  # it is right in one process, too
    assert share(program, [test, f"{test}\nassert False"]) == 0.5


WRITES = """
import os
def write_all(names):
    "What looks like the secret of a report, as a proof that all passed, to wherever it may be read."
    for value in list(names.values()):
        for secret in [value.get("nonce")] if isinstance(value, dict) else [value]:
            if isinstance(secret, str) and len(secret) == 32:
                write("".join(f"{secret}:{i}\\n" for i in range(4)).encode())
def write(data, descriptors=range(255, -1, -1)):
    for fd in descriptors:
        try:
            os.write(fd, data)
        except OSError:
            pass
"""
CHEATS = {
    "frames": """
import sys
def f(x):
    frame = sys._getframe()
    while frame := frame.f_back:
        write_all(frame.f_locals)
        write_all(frame.f_globals)
    os._exit(0)
""",
    "garbage": """
import gc
def f(x):
    for found in gc.get_objects():
        if isinstance(found, dict):
            write_all(found)
    os._exit(0)
""",
    "trace": """
import sys
def trace(frame, *_):
    sys.settrace(None)
    sys.setprofile(None)
    while frame := frame.f_back:
        write_all(frame.f_locals)
    os._exit(0)
def f(x):
    sys.setprofile(trace)
    sys.settrace(trace)
""",
    "names of built-ins and modules": """
abs = lambda x: 0
class math:
    isclose = lambda *a: True
f = lambda x: 9
""",
    "counts as anything": """
class E:
    __sub__ = __rsub__ = __abs__ = __float__ = __round__ = lambda s, *o: 1.0
    __lt__ = __gt__ = __eq__ = __contains__ = __bool__ = lambda s, *o: True
    __hash__ = lambda s: hash(1)
    __class__ = list
f = lambda x: E()
""",
    "more names than were asked for": """
import slime_rewards.code.remote as remote
def done(self, request):
    names = {"__builtins__": ["mine", 0], "AssertionError": ["mine", 0], "abs": ["mine", 0], "f": ["mine", 0]}
    if request[0] == "names":
        return ["value", ["dict", *map(list, names.items())], ["list"]]
    return ["value", True, ["list", ["list", 1], ["list", 1], ["list", 1]]]
remote.Peer.done = done
""",
    "replaces what answers": """
import sys
def f(x):
    sys.modules["slime_rewards.code.remote"].encode = lambda *a: True
    sys._getframe(1).f_globals["OPERATIONS"].update(base=lambda x: True)
    return f
""",
    "says passed": """
def f(x):
    write(b"passed 0\\npassed 1\\npassed 2\\npassed 3\\n")
""",
    "says passed later": """
import threading, time
def late():
    while True:
        write(b"passed 0\\n[]\\nsaid\\n")
        time.sleep(0.01)
def f(x):
    threading.Thread(target=late, daemon=True).start()
    time.sleep(0.2)
""",
    "deep message": """
def f(x):
    write(b"[" * 10**5 + b"]" * 10**5, range(4, 256))
""",
    "huge value": "f = lambda x: 'x' * (17 << 20)",
    "raises what a runner takes for skipped": "import unittest\ndef f(x):\n    raise unittest.SkipTest",
}
TESTS = [
    "assert f(1) == [1]",
    "import math\nassert math.isclose(f(1), 1.0)",
    "assert abs(f(1) - 1) < 1e-6 and f(1) > 0.5",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 1)\n"
    "assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()",
]


QUICK_CHEATS = ("frames", "counts as anything", "more names than were asked for", "says passed", "deep message")


@pytest.mark.parametrize("cheat", quick(CHEATS, *QUICK_CHEATS))
def test_a_cheat_does_not_pass(cheat: str) -> None:
    assert share(WRITES + cheat, TESTS) == 0.0


def test_the_process_of_the_program_never_sees_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is sent: its own text, then calls of what it defines."""
    sent: list[bytes] = []

    async def call(self: Any, what: str, body: bytes, timeout: float, known: Any = runs._Process.call) -> Any:
        if what == "a program":
            sent.append(body)
        return await known(self, what, body, timeout)

    monkeypatch.setattr(runs._Process, "call", call)
    assert share("def f(x):\n    return x + 1", ["assert f(41) == 42"]) == 1.0
    assert any(b"41" in body for body in sent)
    assert not any(b"42" in body or b"assert" in body for body in sent)


def test_no_answer_is_no_pass() -> None:
    started = time.monotonic()
    assert share("import time\ndef f(x):\n    time.sleep(99)", ["assert f(1) is None"], seconds=1.0) == 0.0
    assert time.monotonic() - started < 40
