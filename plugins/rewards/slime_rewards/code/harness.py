"""Runs one program, or its tests, in a sandbox: started with this file's text, told what to do over descriptor 0.

::

    runs.py --job--> "up" --go--> the program's own code, `token` --tests--> the tests; what they prove on descriptor 1

Each answer is a line on descriptor 3. How passing is proved: nothing in the process of a program is secret, and it
decides nothing. Calls and scripts give their values out, to be compared outside. Python texts run in the process of
mode `judge`, which never runs a line of the program; in mode `asserts` this one answers its questions (`remote.py`).
It imports only the standard library, and the two files that `runs.py` sends along.
"""

import json
import os
import sys
import tempfile
import types

from slime_rewards.code.judge import run_tests
from slime_rewards.code.remote import Peer, Refused
from slime_rewards.code.values import decode

_SOLUTION = "<solution>"
_MARK = 3
_STARRED = [
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
]  # fmt: skip
_PREAMBLE = "\n".join(
    [f"from {name} import *" for name in _STARRED]
    + [f"import {name}" for name in [*_STARRED, "time", "fractions"]]
    + ["sys.setrecursionlimit(50_000)"]
)
"""Names that LiveCodeBench (`testing_util.py`) and APPS define before a solution; starter code relies on them."""


def main():
    """Do the job and end the process."""
    tests, report = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # what the program reads and prints is no part of the conversation
        os.dup2(nothing, descriptor)
    os.set_inheritable(_MARK, False)
    job = _message(tests)
    os.write(_MARK, b"up\n")
    os.read(tests, 1)
    sys.set_int_max_str_digits(0)  # benchmarks have integers of more than 4300 digits
    try:
        run = {"script": _script, "asserts": _asserts, "calls": _calls, "judge": _judge}[job["mode"]]
        code = run(job, report, tests)
    except BaseException:
        code = 1
    if job["mode"] == "script":
        sys.exit(code)  # threads are joined, atexit functions run, files are flushed, as Python does
    os._exit(code)


def _message(descriptor):
    """The next message; nothing is read ahead."""
    return json.loads(_exactly(descriptor, int.from_bytes(_exactly(descriptor, 8), "big")))


def _exactly(descriptor, size):
    data = b""
    while len(data) < size and (part := os.read(descriptor, min(size - len(data), 1 << 20))):
        data += part
    return data


def _write(descriptor, data):
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _tests(descriptor, job):
    """Say that the program's own code has run, and wait for the tests."""
    os.write(_MARK, job["token"].encode() + b"\n")
    return _message(descriptor)


def _script(job, report, tests):
    """The program with the test's text as its input and the report as its output."""
    given = _tests(tests, job)["stdin"].encode("utf-8", "replace")
    with tempfile.TemporaryFile() as file:
        file.write(given)
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.dup2(report, 1)
    os.close(report)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__ = sys.stdin, sys.stdout
    code = 0
    try:
        exec(compile(job["program"], _SOLUTION, "exec"), _namespace(_PREAMBLE))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        code = 1
    return code & 255


def _asserts(job, report, tests):
    """The program, then what the tests ask of it, until the sandbox ends."""
    namespace = _namespace()
    exec(compile(job["program"], _SOLUTION, "exec"), namespace)  # what it raises fails every test
    peer = Peer(lambda message: _exchange(report, tests, message))
    peer.scope = namespace
    request = _tests(tests, job)
    while True:
        request = peer.exchange(peer.done(request))


def _judge(job, report, tests):
    """The tests, in a process without the program; a line for each that passes."""

    def passed(index):
        os.write(_MARK, f"passed {index}\n".encode())
        _message(tests)

    statements = _tests(tests, job)["statements"]
    run_tests(statements, lambda message: _exchange(report, tests, message), passed)
    return 0


def _exchange(report, answers, message):
    """Say it to the other process by way of `runs.py`, and wait for what that one says."""
    _write(report, json.dumps(message).encode())
    os.write(_MARK, b"said\n")
    try:
        return _message(answers)
    except (ValueError, RecursionError) as wrong:
        raise Refused(str(wrong)) from None


def _calls(job, report, tests):
    """The program, then each call; the values go to the report as JSON, and are judged elsewhere."""
    namespace = _namespace(_PREAMBLE)
    name = job["function"]
    before = namespace.get(name)
    exec(compile(job["program"], _SOLUTION, "exec"), namespace)
    function = namespace.get(name)
    if function is None or function is before:
        function = getattr(namespace["Solution"](), name)
    tests = _tests(tests, job)
    for index, arguments in enumerate(decode(tests["arguments"], None)):
        try:
            line = json.dumps([tests["nonce"], index, function(*arguments)], default=_as_list)
        except BaseException:
            continue
        _write(report, line.encode() + b"\n")
    return 0


def _namespace(preamble=""):
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # pickling and dataclasses look classes up here
    exec(preamble, vars(module))
    return vars(module)


def _as_list(value):
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError


if __name__ == "__main__":
    main()
