"""Runs a program and its tests in a sandbox of its own, by the three ways of testing it.

`__init__` calls `run_assertions`, `run_calls` and `run_program`. The process is `harness.py` in a fresh interpreter of
a `slime_sandbox_local.LocalSandbox`, which ends with all that the program started. The sandbox is made of what the
kernel permits (`best-effort`), since a reward must score in a container too.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime_sandbox_local import LocalSandbox, SandboxLimits

_HARNESS = Path(__file__).with_name("harness.py")
_START_SECONDS = 10.0
"""What the interpreter may take to come up, on top of the program's time."""


async def run_assertions(program: str, statements: Sequence[str], limits: SandboxLimits, seconds: float) -> set[int]:
    """Indices of the texts that ran to their end after the program."""
    nonce = secrets.token_hex(16)
    tests = {"statements": list(statements), "nonce": nonce}
    ran = await _run({"mode": "asserts", "program": program}, tests, limits, seconds)
    proofs = {f"{nonce}:{index}": index for index in range(len(statements))}
    return {proofs[line] for line in ran.output.splitlines() if line in proofs}


async def run_calls(
    program: str, function: str, arguments: Sequence[list[Any]], limits: SandboxLimits, seconds: float
) -> dict[int, Any]:
    """Index of the call -> the value it returned, as JSON gives it back."""
    nonce = secrets.token_hex(16)
    job = {"mode": "calls", "program": program, "function": function}
    ran = await _run(job, {"arguments": list(arguments), "nonce": nonce}, limits, seconds)
    values: dict[int, Any] = {}
    for line in ran.output.splitlines():
        if line.startswith(f'["{nonce}", '):
            with contextlib.suppress(ValueError, RecursionError):
                _, index, value = json.loads(line)
                values.setdefault(index, value)
    return values


async def run_program(program: str, text: str, limits: SandboxLimits, seconds: float) -> str | None:
    """What the script printed; None when it failed, printed too much or overran."""
    ran = await _run({"mode": "script", "program": program}, {"stdin": text}, limits, seconds)
    return ran.output if ran.status == 0 and ran.complete else None


@dataclass
class _Ran:
    output: str = ""
    status: int | None = None
    complete: bool = False


async def _run(job: dict[str, Any], tests: dict[str, Any], limits: SandboxLimits, seconds: float) -> _Ran:
    """Run the harness; what came over its descriptor 1 (a script's standard output), and how it ended.

    Args:
        seconds: Wall and CPU time of the program and the tests.
    """
    token = secrets.token_hex(16)
    command = [sys.executable, "-I", "-c", _HARNESS.read_text(encoding="utf-8")]
    async with LocalSandbox(replace(limits, cpu_seconds=seconds + 1), isolation="best-effort") as box:
        opened, _ = await box.request(
            {"op": "open", "command": command, "whole": True}, what="an interpreter in a sandbox",
            timeout=_START_SECONDS,
        )  # fmt: skip
        if "process" not in opened:
            return _Ran()

        async def call(what: str, body: bytes, timeout: float) -> tuple[dict[str, Any], bytes]:
            asked = {"op": "call", "process": opened["process"]}
            return await box.request(asked, what=f"{what} in a sandbox", timeout=max(0.0, timeout), body=body)

        up, _ = await call("the start of an interpreter", _message({**job, "token": token}), _START_SECONDS)
        if "mark" not in up:
            return _Ran()
        until = time.monotonic() + seconds
        ready, _ = await call("a program", b"\n", seconds)
        if ready.get("mark", "").strip() != token:
            return _Ran()
        done, body = await call("the tests of a program", _message(tests), until - time.monotonic())
    output = body[: done["out"]].decode("utf-8", "replace")
    return _Ran(output, done["code"] if "mark" not in done else None, "out" not in done.get("cut", ()))


def _message(value: dict[str, Any]) -> bytes:
    part = json.dumps(value).encode()
    return len(part).to_bytes(8, "big") + part
