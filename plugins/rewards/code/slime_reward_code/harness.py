"""Runs one program and its tests in a sandbox: started with this file's text, told what to do over descriptor 0.

::

    runs.py --job--> "up" --go--> the program's own code, `token` --tests--> the tests; what they prove on descriptor 1

Each answer is a line on descriptor 3. How passing is proved: a test text passes only when its secret is written to the
report after its last statement, and the secret reaches the process only after the program's own code has run. Exiting,
raising, printing "ok", patching builtins or modules before the tests, and objects that claim to be equal to everything
prove nothing. It imports only the standard library, since it runs outside the package.
"""

import ast
import builtins
import importlib
import json
import os
import sys
import tempfile
import types

_GUARDED_MODULES = (
    "math", "cmath", "copy", "collections", "itertools", "functools", "operator", "re", "json", "string", "random",
    "decimal", "fractions", "statistics", "heapq", "bisect", "unittest", "unittest.case", "types", "typing", "ast",
    "os", "sys", "json.decoder", "json.scanner", "__main__",
)  # fmt: skip
"""Put back as they were before the tests run, should the program have changed them."""
_SOLUTION = "<solution>"
_MARK = 3


def main():
    """Never returns."""
    tests, report = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # what the program reads and prints is no part of the conversation
        os.dup2(nothing, descriptor)
    os.set_inheritable(_MARK, False)
    job = _message(tests)
    os.write(_MARK, b"up\n")
    os.read(tests, 1)
    try:
        code = {"script": _script, "asserts": _asserts, "calls": _calls}[job["mode"]](job, report, tests)
    except BaseException:
        code = 1
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
        exec(compile(job["program"], _SOLUTION, "exec"), _namespace())
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        code = 1
    sys.stdout.flush()
    return code & 255


def _asserts(job, report, tests):
    """The program, then each test; a secret on the report for each that runs to its end."""
    # The program may change any module, this one too, so what follows it is held in local names.
    read_tests, write, guarded, check, run, compiled, end = (
        _tests, os.write, _guard_comparisons, _checked, exec, compile, os._exit
    )  # fmt: skip
    pristine, modules, restore = dict(vars(builtins)), _snapshot(), _restore
    namespace = _namespace()
    run(compiled(job["program"], _SOLUTION, "exec"), namespace)  # what it raises fails every test
    sys.settrace(None)
    sys.setprofile(None)
    restore(modules, pristine)
    tests = read_tests(tests, job)
    for index, text in enumerate(tests["statements"]):
        scope = {**namespace, "__builtins__": pristine, "__slime_checked__": check}
        try:
            run(compiled(guarded(text), "<tests>", "exec"), scope)
        except BaseException:
            continue
        write(report, f"{tests['nonce']}:{index}\n".encode())
    end(0)


def _calls(job, report, tests):
    """The program, then each call; the values go to the report as JSON, and are judged elsewhere."""
    namespace = _namespace()
    exec(compile(job["program"], _SOLUTION, "exec"), namespace)
    name = job["function"]
    function = namespace.get(name) or getattr(namespace["Solution"](), name)
    tests = _tests(tests, job)
    for index, arguments in enumerate(tests["arguments"]):
        try:
            line = json.dumps([tests["nonce"], index, function(*arguments)], default=_as_list)
        except BaseException:
            continue
        _write(report, line.encode() + b"\n")
    return 0


def _namespace():
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # pickling and dataclasses look classes up here
    return vars(module)


def _as_list(value):
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError


def _snapshot():
    return [(module, dict(vars(module))) for module in map(importlib.import_module, _GUARDED_MODULES)]


def _restore(modules, pristine):
    """Undo what the program did to built-ins and to modules that tests, or this harness, lean on."""
    for module, content in [*modules, (builtins, pristine)]:
        names = vars(module)
        for name in set(names) - set(content):
            del names[name]
        names.update(content)


def _guard_comparisons(text):
    """The test with both sides of every comparison in an `assert` checked by `_checked`."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            for inner in list(ast.walk(node.test)):
                if isinstance(inner, ast.Compare):
                    inner.left = _wrapped(inner.left)
                    inner.comparators = [_wrapped(side) for side in inner.comparators]
    return ast.fix_missing_locations(tree)


def _wrapped(side):
    return ast.Call(func=ast.Name(id="__slime_checked__", ctx=ast.Load()), args=[side], keywords=[])


def _checked(value, depth=0):
    """The value, unless it decides by the program's own code whether it equals something."""
    kind = type(value)
    if kind in (list, tuple, set, frozenset) and depth < 8:
        for item in value:
            _checked(item, depth + 1)
    elif kind is dict and depth < 8:
        for key, item in value.items():
            _checked(key, depth + 1)
            _checked(item, depth + 1)
    method = getattr(kind, "__eq__", None)
    if getattr(getattr(method, "__code__", None), "co_filename", "") == _SOLUTION and _equals_anything(value):
        raise AssertionError("a value that says it is equal to anything")
    return value


def _equals_anything(value):
    try:
        return bool(value == object()) or not bool(value != object())
    except Exception:  # an honest comparison may expect its own kind
        return False


if __name__ == "__main__":
    main()
