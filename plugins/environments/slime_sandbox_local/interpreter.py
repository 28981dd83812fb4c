"""A Python interpreter in a sandbox, whose names stay between pieces of code.

`Interpreter.run` sends code to the process of `inside/repl.py`, and gets the printed output. Generate functions have
one interpreter for each sample. If code overruns its time, the interpreter is killed and all its names are lost.
`Ran.lost` has the reason, and the next code runs in a new interpreter.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from slime_sandbox_local.local import LocalSandbox, result_of
from slime_sandbox_local.protocol import TIMED_OUT

_DRIVER = Path(__file__).with_name("inside") / "repl.py"
_START_SECONDS = 30.0


@dataclass(frozen=True)
class Ran:
    """Result of running one piece of code."""

    output: str
    """Printed text, the value of the last expression, the traceback."""
    failed: bool
    """True if the code raised, or did not end normally."""
    lost: str | None = None
    """Reason why the interpreter and its state are gone; a new interpreter runs the next code."""


class Interpreter:
    """An interpreter: `async with Interpreter(LocalSandbox()) as python: await python.run("x = 1", timeout=5)`."""

    def __init__(self, sandbox: LocalSandbox) -> None:
        self.sandbox = sandbox
        self._process: int | None = None

    async def run(self, code: str, *, timeout: float) -> Ran:
        """Run code for at most `timeout` seconds. Raises SandboxError: the sandbox is gone."""
        if self._process is None:
            answer, _ = await self.sandbox.request(
                {"op": "open", "command": [sys.executable, "-I", "-c", _driver()], "env": {}},
                what="an interpreter in a sandbox", timeout=_START_SECONDS,
            )  # fmt: skip
            if "process" not in answer:
                return Ran(str(answer.get("error", "")), True, "it could not be started")
            self._process = answer["process"]
        line = json.dumps(code).encode() + b"\n"
        answer, body = await self.sandbox.request(
            {"op": "call", "process": self._process}, what="code in a sandbox", timeout=timeout, body=line
        )
        result = result_of(answer, body)
        output = "\n".join(part.rstrip("\n") for part in (result.out, result.err) if part.strip())
        lost = None
        if "mark" not in answer:
            self._process = None
            lost = f"it ended with status {result.code}"
            if result.code == TIMED_OUT:
                lost = f"time limit of {timeout:g} s"
        return Ran(output, lost is not None or not answer["mark"].startswith("ok"), lost)

    async def __aenter__(self) -> Self:
        await self.sandbox.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process = None
        await self.sandbox.__aexit__(kind, error, trace)


def _driver() -> str:
    return _DRIVER.read_text(encoding="utf-8")
