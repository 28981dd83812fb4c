"""Unit tests of the response's program, run in limited processes: 1.0 when all pass, or the fraction that pass.

The program is the last fenced ```` ```python ```` block of the response (else the last fenced block; no block scores
0.0). The tests are `metadata["tests"]`, else the label, in the forms of HumanEval, MBPP, APPS and LiveCodeBench
(`cases.py`). Each run of a program has a sandbox of its own (`runs.py`), and nothing in it decides: what it returns or
prints is compared outside, and Python texts run in another one (`judge.py`), which asks it for values (`remote.py`).

What the sandbox must hold is `--sandbox-isolation`'s to say, before the run starts.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

from pydantic import Field
from slime_sandbox_local import SandboxLimits, check_settings

from slime_core import Args, PluginOptions, RewardTraits, Sample, declares, options
from slime_rewards.code.cases import Asserts, Calls, Tests, read_tests, same_output, same_value
from slime_rewards.code.runs import run_assertions, run_calls, run_program
from slime_rewards.code.values import encode


class Options(PluginOptions):
    """`plugins: {code: {...}}`."""

    score: Literal["all", "fraction"] = "all"
    """all: 1.0 when every test passes, else 0.0; fraction: the share of tests that pass."""
    timeout: float = Field(6.0, gt=0, allow_inf_nan=False)
    """Seconds per test."""
    memory_mb: int = Field(1024, ge=128)
    """Address space of the program, and resident memory of all its processes together."""
    max_processes: int = Field(16, ge=1)
    """Processes and threads of the program at a time."""
    max_output_kb: int = Field(1024, ge=1)
    """How much more than the expected output a program may print per test before it is stopped."""
    max_file_mb: int = Field(16, ge=0)
    """Largest file that the program may write."""
    network: bool = False
    """Let the program reach the network; without it the network is cut where the kernel permits."""


_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")


@declares(RewardTraits(execution="thread", check=check_settings))  # it only waits for sandboxes
def reward(args: Args, sample: Sample) -> float:
    """Return a reward in [0, 1]; 0.0 for a response without a program.

    Raises:
        ValueError: The tests are missing, or not in a known form.
    """
    wanted = options(args, "code", Options)
    tests = read_tests(sample.metadata.get("tests") or sample.label, sample.metadata)
    program = extract_program(sample.response)
    if program is None:
        return 0.0
    until = float("inf") if args.rm_timeout is None else time.monotonic() + 0.9 * args.rm_timeout
    with ThreadPoolExecutor(1) as thread:  # as a term of weighted_sum it is called where an event loop runs
        passed = thread.submit(asyncio.run, _passed(program, tests, wanted, until, args.sandbox_isolation)).result()
    if wanted.score == "fraction":
        return sum(passed) / len(tests)
    return float(len(passed) == len(tests) and all(passed))


def extract_program(response: str) -> str | None:
    """Return the last fenced block marked as Python, else the last without a language, or None without such a block."""
    blocks = _FENCE.findall(response.replace("\r\n", "\n"))
    marked = [code for language, code in blocks if language.lower() in _PYTHON]
    bare = [code for language, code in blocks if not language]
    found = marked or bare
    return found[-1] if found and found[-1].strip() else None


def sandbox_limits(wanted: Options) -> SandboxLimits:
    """Return the limits of a run of a program."""
    return SandboxLimits(
        memory_mb=wanted.memory_mb, processes=wanted.max_processes, output_kb=wanted.max_output_kb,
        file_mb=wanted.max_file_mb, disk_mb=4 * max(16, wanted.max_file_mb), open_files=64, stack_mb=64,
        network=wanted.network,
    )  # fmt: skip


def _with_room(limits: SandboxLimits, expected: str, given: str = "") -> SandboxLimits:
    """Return the limits with room for the expected output, and for a file with the input."""
    output_kb = limits.output_kb + (len(expected.encode("utf-8", "replace")) >> 10)
    file_mb = max(limits.file_mb, (len(given.encode("utf-8", "replace")) >> 20) + 1) if given else limits.file_mb
    return replace(limits, output_kb=output_kb, file_mb=file_mb, disk_mb=max(limits.disk_mb, 2 * file_mb))


async def _passed(program: str, tests: Tests, wanted: Options, until: float, isolation: str) -> list[bool]:
    """Return whether each test passed, in order, until the monotonic time `until`.

    The list is shorter than the tests if the time was reached, or if a failed test decided the score.
    """
    limits = sandbox_limits(wanted)

    def seconds(count: int) -> float:
        return max(0.1, min(wanted.timeout * count, until - time.monotonic()))

    if isinstance(tests, Asserts):
        done = await run_assertions(program, tests.statements, limits, seconds(len(tests)), isolation)
        return [index in done for index in range(len(tests))]
    if isinstance(tests, Calls):
        limits = _with_room(limits, json.dumps(encode(tests.expected, str)))
        values = await run_calls(program, tests.function, tests.arguments, limits, seconds(len(tests)), isolation)
        return [index in values and same_value(values[index], e) for index, e in enumerate(tests.expected)]
    passed: list[bool] = []
    for given, expected in zip(tests.inputs, tests.outputs):
        output = await run_program(program, given, _with_room(limits, expected, given), seconds(1), isolation)
        passed.append(output is not None and same_output(output, expected))
        if (wanted.score == "all" and not passed[-1]) or time.monotonic() >= until:
            break
    return passed
