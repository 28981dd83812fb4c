"""Run a program and its tests in a separate sandbox, in three ways: assertions, calls, or a script.

`__init__` calls `run_assertions`, `run_calls` and `run_program`. Each process is `harness.py` in a fresh interpreter
of a `slime_sandbox_local.LocalSandbox`; closing the sandbox ends all processes that the program started. `isolation` is
the setting `--sandbox-isolation`.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime_sandbox_local import LocalSandbox, SandboxLimits

from slime_rewards.code.values import encode, read_json

_HERE = Path(__file__).parent
_IMPORT = """
import sys, types
for name, text in {modules!r}.items():
    module = sys.modules["slime_rewards.code." + name] = types.ModuleType("slime_rewards.code." + name)
    exec(compile(text, name + ".py", "exec"), vars(module))
"""
_MESSAGE_KB = 16_384
"""Output limit in KB that fits a value exchanged between a program and its tests."""
_START_SECONDS = 10.0
"""Seconds allowed for the interpreter's start, in addition to the program's time."""


async def run_assertions(
    program: str, statements: Sequence[str], limits: SandboxLimits, seconds: float, isolation: str
) -> set[int]:
    """Return the indices of the passed statements; they run in a process that calls the program in another one."""
    limits = replace(limits, output_kb=max(_MESSAGE_KB, limits.output_kb))
    passed: set[int] = set()
    async with _started({"mode": "asserts", "program": program}, limits, seconds, isolation) as solution:
        until = time.monotonic() + seconds
        if solution is None or not await solution.ready(seconds):
            return passed
        left = until - time.monotonic()
        async with _started({"mode": "judge"}, limits, seconds, isolation) as judge:
            if judge is None or not await judge.ready(_START_SECONDS):
                return passed
            until = time.monotonic() + left
            heard, body = await judge.call("tests", _message({"statements": list(statements)}), left)
            while "mark" in heard:
                if heard["mark"] == "said\n":  # only the judge parses the program's response
                    heard, body = await solution.call("a program", _framed(body), until - time.monotonic())
                    if "mark" not in heard:
                        break
                else:
                    passed.add(int(heard["mark"].removeprefix("passed ")))
                    body = b"null"
                heard, body = await judge.call("tests", _framed(body), until - time.monotonic())
    return passed


async def run_calls(
    program: str, function: str, arguments: Sequence[list[Any]], limits: SandboxLimits, seconds: float, isolation: str
) -> dict[int, Any]:
    """Return index of the call -> its return value, as JSON values."""
    nonce = secrets.token_hex(16)
    job = {"mode": "calls", "program": program, "function": function}
    tests = {"arguments": encode(list(arguments), _refuse), "nonce": nonce}
    ran = await _run(job, tests, limits, seconds, isolation)
    values: dict[int, Any] = {}
    for line in ran.output.splitlines():
        if line.startswith(f'["{nonce}", '):
            with contextlib.suppress(ValueError, TypeError, RecursionError):  # the program may have written the line
                _, index, value = read_json(line)
                values.setdefault(index, value)
    return values


def _refuse(value: Any) -> Any:
    raise ValueError(f"an argument of a test is no JSON value: {type(value).__name__}")


async def run_program(program: str, text: str, limits: SandboxLimits, seconds: float, isolation: str) -> str | None:
    """Return the script's output, or None if it failed, printed too much or exceeded its time."""
    ran = await _run({"mode": "script", "program": program}, {"stdin": text}, limits, seconds, isolation)
    return ran.output if ran.status == 0 and ran.complete else None


@dataclass
class _Ran:
    output: str = ""
    status: int | None = None
    complete: bool = False


async def _run(
    job: dict[str, Any], tests: dict[str, Any], limits: SandboxLimits, seconds: float, isolation: str
) -> _Ran:
    """Run the harness; return its output on descriptor 1 (a script's standard output) and its exit.

    Args:
        seconds: Wall and CPU time of the program and the tests.
    """
    async with _started(job, limits, seconds, isolation) as process:
        until = time.monotonic() + seconds
        if process is None or not await process.ready(seconds):
            return _Ran()
        done, body = await process.call("the tests of a program", _message(tests), until - time.monotonic())
    output = body.decode("utf-8", "replace")
    return _Ran(output, done["code"] if "mark" not in done else None, "out" not in done.get("cut", ()))


@dataclass
class _Process:
    """A started harness."""

    box: LocalSandbox
    number: int
    token: str

    async def call(self, what: str, body: bytes, timeout: float) -> tuple[dict[str, Any], bytes]:
        """Send input; return the result (`mark`: the harness's line, absent if it ended) and the output."""
        asked = {"op": "call", "process": self.number}
        done, output = await self.box.request(
            asked, what=f"{what} in a sandbox", timeout=max(0.0, timeout), body=body
        )  # fmt: skip
        return done, output[: done["out"]]

    async def ready(self, timeout: float) -> bool:
        """Return True if the program's own code ran to its end."""
        done, _ = await self.call("a program", b"\n", timeout)
        return str(done.get("mark", "")).strip() == self.token


@contextlib.asynccontextmanager
async def _started(
    job: dict[str, Any], limits: SandboxLimits, seconds: float, isolation: str
) -> AsyncIterator[_Process | None]:
    """Open a sandbox and start the harness with the job; yield None if it did not start."""
    token = secrets.token_hex(16)
    command = [sys.executable, "-I", "-c", _text()]
    async with LocalSandbox(replace(limits, cpu_seconds=seconds + 1), isolation=isolation) as box:
        opened, _ = await box.request(
            {"op": "open", "command": command, "whole": True}, what="an interpreter in a sandbox",
            timeout=_START_SECONDS,
        )  # fmt: skip
        process = _Process(box, opened.get("process", 0), token)
        up: dict[str, Any] = {}
        if "process" in opened:
            up, _ = await process.call("the start of an interpreter", _message({**job, "token": token}), _START_SECONDS)
        yield process if "mark" in up else None


def _text() -> str:
    """Return the harness's source, preceded by the modules that it imports, which the sandbox cannot see."""
    modules = {name: (_HERE / f"{name}.py").read_text(encoding="utf-8") for name in ("values", "remote", "judge")}
    return _IMPORT.format(modules=modules) + (_HERE / "harness.py").read_text(encoding="utf-8")


def _message(value: dict[str, Any]) -> bytes:
    return _framed(json.dumps(value).encode())


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "big") + part
