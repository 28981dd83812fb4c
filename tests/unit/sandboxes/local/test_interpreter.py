from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from slime_sandbox_local import Interpreter, InterpreterPool, LocalSandbox, SandboxError, SandboxLimits, isolation_here

pytestmark = pytest.mark.skipif(not isolation_here().complete, reason=f"no complete isolation here: {isolation_here()}")
TIME = 60.0


@pytest.fixture
async def python() -> AsyncIterator[Interpreter]:
    async with Interpreter(LocalSandbox()) as opened:
        yield opened


async def test_names_stay_and_the_last_value_is_shown(python: Interpreter) -> None:
    assert (await python.run("def f(x):\n    return x + y\ny = 1", timeout=TIME)).output == ""
    ran = await python.run("print('a')\nf(1)", timeout=TIME)
    assert (ran.output, ran.failed, ran.lost) == ("a\n2", False, None)
    assert (await python.run("None", timeout=TIME)).output == ""
    assert (await python.run("input()", timeout=TIME)).output.endswith("EOFError: EOF when reading a line")
    assert (await python.run("import sys; sys.exit(3)", timeout=TIME)).output == "SystemExit: 3"
    assert (await python.run("y", timeout=TIME)).output == "1"
    assert (await python.run("'\u00e9\\ud800'", timeout=TIME)).output == "'\u00e9\\ud800'"


async def test_a_traceback_has_the_codes_frames_only(python: Interpreter) -> None:
    ran = await python.run("def f():\n    return 1 / 0\nf()", timeout=TIME)
    assert ran.failed
    assert ran.output.splitlines() == [
        "Traceback (most recent call last):",
        '  File "<code>", line 3, in <module>',
        '  File "<code>", line 2, in f',
        "ZeroDivisionError: division by zero",
    ]
    assert (await python.run("def", timeout=TIME)).output.endswith("SyntaxError: invalid syntax")


async def test_a_lost_interpreter_is_replaced(python: Interpreter) -> None:
    await python.run("x = 1", timeout=TIME)
    ran = await python.run("while True: pass", timeout=1.0)
    assert ran.failed
    assert ran.lost == "time limit of 1 s"
    assert "NameError" in (await python.run("x", timeout=TIME)).output
    ran = await python.run("import os; os._exit(7)", timeout=TIME)
    assert ran.lost == "it ended with status 7"
    assert (await python.run("1", timeout=TIME)).output == "1"


async def test_the_least_recently_used_gives_way_and_is_rebuilt() -> None:
    pool = InterpreterPool(2, SandboxLimits(), "require")
    for key in "abc":
        assert (await pool.run(key, f"x = '{key}'", timeout=TIME)).replayed == 0
    assert (pool.live, pool.evictions) == (2, 1)
    call = await pool.run("b", "x", timeout=TIME, history=["x = 'b'"])
    assert (call.ran.output, call.replayed) == ("'b'", 0)
    call = await pool.run("a", "x", timeout=TIME, history=["x = 'a'"])
    assert (call.ran.output, call.replayed, pool.live) == ("'a'", 1, 2)
    await pool.drop("a")
    assert pool.live == 1
    await pool.close()
    assert pool.live == 0


@pytest.mark.slow
async def test_calls_wait_for_a_place_and_give_up() -> None:
    pool = InterpreterPool(1, SandboxLimits(), "require")
    calls = [pool.run(key, "1 + 1", timeout=TIME) for key in range(4)]
    assert [call.ran.output for call in await asyncio.gather(*calls)] == ["2"] * 4
    assert pool.live == 1
    long = asyncio.create_task(pool.run("long", "import time; time.sleep(1000)", timeout=TIME * 10))
    while "long" not in pool._busy:
        await asyncio.sleep(0.01)
    with pytest.raises(SandboxError, match=r"no sandbox was free for 0\.5 s"):
        await pool.run("late", "1", timeout=TIME, wait=0.5)
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long
    assert pool.live == 0
