"""The table, its board, stall reports, the watchdog and bounded waits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading

import pytest
from slime_runs import board as board_module
from slime_runs.board import Board, rows, start_board, stop_board
from slime_runs.stacks import stacks
from slime_runs.stalls import stall_report

from slime_core.config import Args
from slime_core.errors import RolloutError
from slime_core.waits import (
    Overdue,
    by_deadline,
    current,
    gave_up,
    named,
    progress,
    published,
    raise_in,
    table,
    take_late,
    waiting,
    watchdog,
    within,
)
from slime_core.waits.pace import Pace
from tests.until import wait_until


@pytest.fixture(autouse=True)
def own_table(monkeypatch):
    """Other tests of this process may have left tasks behind that wait for ever."""
    monkeypatch.setattr(table, "_table", {})
    monkeypatch.setattr(table, "_progress", {})


@pytest.fixture
def board(tmp_path, monkeypatch):
    monkeypatch.setattr(board_module, "_TICK", 0.01)
    monkeypatch.setattr(board_module, "_BETWEEN", 0.0)
    yield start_board(tmp_path, "rank 0")
    stop_board()
    table.forget_all()


def _read(board):
    return json.loads(board.path.read_text())


# -- the board ---------------------------------------------------------------------------------------


def test_the_board_tells_who_waits_for_what(board) -> None:
    progress(rollout_id=3)
    with waiting("weights", deadline=0.0, then="the run stops"):
        said = wait_until(lambda: (b := _read(board))["waits"] and b)
    assert (said["role"], said["pid"]) == ("rank 0", os.getpid())
    assert said["progress"]["rollout_id"] == 3
    (row,) = said["waits"]
    assert (row["what"], row["then"], row["overdue"], row["in"]) == ("weights", "the run stops", True, "thread")
    wait_until(lambda: not _read(board)["waits"])


def test_a_clean_end_leaves_nothing(board) -> None:
    board.path.with_suffix(".ask").write_text("x")
    stop_board()
    stop_board()
    assert list(board.path.parent.iterdir()) == []


def test_boards_of_dead_processes_of_this_host_are_swept(tmp_path) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait(60)
    waits = tmp_path / "waits"
    waits.mkdir()
    host = Board(tmp_path, "x").describe()["host"]
    (waits / "dead.json").write_text(json.dumps({"host": host, "pid": done.pid, "birth": ""}))
    (waits / "reused.json").write_text(json.dumps({"host": host, "pid": os.getpid(), "birth": "1"}))
    (waits / "elsewhere.json").write_text(json.dumps({"host": "other", "pid": done.pid, "birth": ""}))
    board = start_board(tmp_path, "x")
    assert sorted(p.name for p in waits.iterdir()) == ["elsewhere.json", board.path.name]
    stop_board()


def test_a_forked_child_is_not_the_run(board) -> None:
    with waiting("parent's", deadline=None, then="-"):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if current() == [] and stall_report("x") is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert board.path.exists()


# -- stacks and stall reports ------------------------------------------------------------------------


async def test_stacks_go_down_to_the_line_that_waits() -> None:
    async def deep() -> None:
        await asyncio.Event().wait()  # the line

    async def middle() -> None:
        await deep()

    tasks = [asyncio.create_task(middle(), name=f"m{i}") for i in range(3)]
    await asyncio.sleep(0)
    text = stacks([asyncio.get_running_loop()])
    assert "await asyncio.Event().wait()  # the line" in text
    assert "task m0 and 2 more at the same place" in text
    assert "thread MainThread" in text
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_request_for_stacks_is_answered(board) -> None:
    asks = [board.path.with_suffix(f".{question}.ask") for question in ("7", "8")]
    for ask in asks:
        ask.touch()
    for answer in (ask.with_suffix(".stacks") for ask in asks):
        wait_until(answer.exists)
        assert answer.read_text().startswith("thread ")
    assert not any(ask.exists() for ask in asks)


def test_stall_report(board) -> None:
    (board.path.parent / "other-1.json").write_text('{"role": "rank 1", "waits": ["broadcast"]}')
    with waiting("the reward of group 4", deadline=1.0, then="retried"):
        message = gave_up("Reward of group 4!", 1.0, "policy retry")
    assert message.startswith("Reward of group 4!: not done within 1 s (policy retry); waits and stacks: ")
    (path,) = (board.run_dir / "stalls").iterdir()
    assert str(path) in message
    assert path.name.endswith("-reward-of-group-4.txt")
    text = path.read_text()
    assert "the reward of group 4 (deadline 1 s; then: retried)" in text
    assert '"rank 1"' in text
    assert "thread MainThread" in text


# -- the watchdog ------------------------------------------------------------------------------------


def _overdue(seconds, **details):
    entered = waiting("save", deadline=1.0, then="the run stops", **details)
    entered.__enter__().since -= 1.0 + seconds
    return entered


def fail(message: str, status: int) -> None:
    raise AssertionError(message)


def test_the_watchdog_reports_once_what_is_overdue(board, caplog) -> None:
    wait = _overdue(watchdog.GRACE + 1)
    watchdog.watch(current(), fail)
    watchdog.watch(current(), fail)
    wait.__exit__(None, None, None)
    assert caplog.text.count("save: not done within 1 s") == 1
    assert len(list((board.run_dir / "stalls").iterdir())) == 1


def test_the_watchdog_ends_only_what_declares_it() -> None:
    ended: list[str] = []
    wait, other = _overdue(60, stop=True), _overdue(60)
    watchdog.watch(current(), lambda message, status: ended.append(message))
    for each in (wait, other):
        each.__exit__(None, None, None)
    assert len(ended) == 1
    assert ended[0].startswith("save: not done within 1 s")


def test_a_process_that_stands_in_c_is_ended(tmp_path) -> None:
    code = f"""
import time
from slime_core.config import Args
from slime_core.waits import published, waiting, watchdog
watchdog.TICK, watchdog.GRACE = 0.01, 0.05
with published(Args(run_dir={str(tmp_path)!r}), "rank 0"):
    with waiting("a collective", deadline=0.05, then="this process ends", stop=True):
        time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 75
    assert "slime: error: a collective: not done within 0.05 s" in done.stderr
    (report,) = (tmp_path / "stalls").iterdir()
    assert "time.sleep(60)" in report.read_text() or "<string>" in report.read_text()


LOOP = """
import asyncio, time
from slime_core.workers.call import awaited, contained
from slime_core.config import Args
from slime_core.waits import asked_to_end, published, waiting, watchdog

watchdog.TICK, watchdog.GRACE, watchdog.BUSY = 0.01, 0.1, 0.05

async def hangs():
    await asyncio.sleep(0)
    time.sleep(60)

async def main():
    with waiting("a sample", deadline={deadline}, then="the run stops", stop=True):
        task = asyncio.ensure_future({call})
        {then}
        async with asyncio.timeout({deadline}):
            await task

with published(Args(run_dir={run_dir!r}), "rank 0"):
    asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("call", "name"), [("awaited('reward of mine', hangs())", "reward of mine, hangs (now at "), ("hangs()", "hangs (")]
)
def test_a_call_that_keeps_the_event_loop_ends_the_process_and_is_named(tmp_path, call, name) -> None:
    """No deadline of the loop can fire: neither the wait's own nor that of the call."""
    code = LOOP.format(run_dir=str(tmp_path), deadline=0.1, call=call, then="")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 75
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("slime: error: a sample: not done within")]
    assert name in said
    assert "keeps the event loop" in said
    assert ("reward of mine, hangs (now at <string>:11) has kept the event loop busy" in done.stderr) == ("of" in call)


def test_a_process_that_is_asked_to_end_does_not_wait_for_a_loop_that_stands_still(tmp_path) -> None:
    call, then = "awaited('reward of mine', hangs())", "asked_to_end(143)"
    code = LOOP.format(run_dir=str(tmp_path), deadline=None, call=call, then=then)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 143
    assert "asked to end, which the event loop cannot: reward of mine, hangs (now at " in done.stderr


def test_waiting_for_a_place_is_not_running() -> None:
    with waiting("reward of sample 3", deadline=None, then="the sample fails", queued=True) as wait:
        wait.since -= 100
        (row,) = [row for row in rows(current()) if row["what"] == "reward of sample 3"]
        assert (row["queued"], row["overdue"], row["waited"]) == (True, False, 0.0)
        wait.restart(5.0)
        (row,) = [row for row in rows(current()) if row["what"] == "reward of sample 3"]
        assert (row["queued"], row["overdue"]) == (False, False)
        assert row["age"] < 5 < 100 <= row["waited"]


def test_a_setting_that_does_not_exist_is_no_missing_deadline() -> None:
    class Stage:
        args = Args()

        @named("the work", deadline="trian_timeout", then="the process ends")
        def work(self) -> None:
            raise AssertionError("it ran without a deadline")

    with pytest.raises(AttributeError, match="trian_timeout"):
        Stage().work()


# -- bounded waits -----------------------------------------------------------------------------------


async def test_within_gives_up_with_a_report(board) -> None:
    async def hangs() -> None:
        await asyncio.Event().wait()  # here

    with pytest.raises(RolloutError, match=r"prompts: not done within 0.02 s \(the run stops\); waits and stacks: "):
        await within(hangs(), "prompts", deadline=0.02, then="the run stops", error=RolloutError)
    (report,) = (board.run_dir / "stalls").iterdir()
    assert "await asyncio.Event().wait()  # here" in report.read_text(), "it still stood there"


@pytest.mark.parametrize("way", ["deadline", "cancelled"])
async def test_a_deadline_holds_whatever_the_coroutine_swallows(monkeypatch, way) -> None:
    """It is not among the loop's tasks any more, so no end of the loop waits for it."""
    monkeypatch.setattr("slime_core.waits.bounded._GRACE", 0.01)
    release = asyncio.Event()

    async def deaf() -> None:
        while not release.is_set():
            with contextlib.suppress(BaseException):
                await release.wait()

    bounded = asyncio.create_task(by_deadline(deaf(), 0.01 if way == "deadline" else None))
    await asyncio.sleep(0)
    if way == "cancelled":
        bounded.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bounded
    else:
        with pytest.raises(Overdue) as error:
            await bounded
        assert error.value.left_behind
    assert asyncio.all_tasks() == {asyncio.current_task()}
    release.set()
    await asyncio.sleep(0)


# -- waits of the core -------------------------------------------------------------------------------


def test_user_code_is_a_wait_with_the_deadline_of_the_run(tmp_path) -> None:
    from slime_core.workers.call import guarded

    seen = []

    def look() -> None:
        (wait,) = current()
        seen.append((wait.what, wait.deadline, wait.stop))

    with published(Args(run_dir=str(tmp_path), user_code_timeout=9.0), "rank 0"):
        guarded(look, "--my-flag")()
        guarded(look, "--rollout-function-path", lasting=True)()
    guarded(look, "after the run")()
    assert seen == [
        ("--my-flag", 9.0, True),
        ("--rollout-function-path", None, False),
        ("after the run", None, True),
    ]
    assert list((tmp_path / "waits").iterdir()) == []


# -- shares of the event loop's time ---------------------------------------------------------------------


def test_many_at_once_let_others_in_between_and_keep_their_order() -> None:
    async def run() -> list[str]:
        seen: list[str] = []
        pace = Pace(asyncio.get_running_loop(), seconds=0.0)  # one in each turn of the loop

        async def one(number: int) -> None:
            await pace.turn()
            seen.append(f"work {number}")

        tasks = [asyncio.ensure_future(one(n)) for n in range(4)]
        await asyncio.sleep(0)
        tasks.append(asyncio.ensure_future(one(4)))  # behind those who wait
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            seen.append("other")
        return seen

    seen = asyncio.run(asyncio.wait_for(run(), 60))
    assert [entry for entry in seen if entry != "other"] == [f"work {n}" for n in range(5)]
    at = [seen.index(f"work {n}") for n in range(5)]
    assert all("other" in seen[one:two] for one, two in itertools.pairwise(at))


async def test_who_is_cancelled_in_the_queue_holds_nobody_up() -> None:
    pace, seen = Pace(asyncio.get_running_loop(), seconds=0.0), list[int]()

    async def one(number: int) -> None:
        await pace.turn()
        seen.append(number)

    tasks = [asyncio.ensure_future(one(n)) for n in range(6)]
    await asyncio.sleep(0)
    for number in (2, 3, 5):
        tasks[number].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert seen == [0, 1, 4]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert pace._began is None
    assert not pace._draining


# -- `waits.bounded`: an exception that another thread raises, in time or too late -----------------------

PROFILED = """
import sys, threading
from slime_core.waits import raise_in, take_late

{late}
sys.setprofile(lambda *seen: None)
(lambda: None)()
sys.setprofile(None)
"""
MATH = "from slime_reward_math import within\nassert within(0.05, lambda: [0 for _ in iter(int, 1)]) is None"
LATE = "take_late(TimeoutError)"


def test_it_is_raised_where_it_is_meant_to_be() -> None:
    def interrupted() -> None:
        raise_in(threading.get_ident(), TimeoutError)
        for _ in range(10):
            pass

    with pytest.raises(TimeoutError):
        interrupted()
    take_late(TimeoutError)


@pytest.mark.parametrize("late", [LATE, pytest.param(MATH, marks=pytest.mark.slow)])
def test_a_profiler_can_be_used_afterwards(late: str) -> None:
    """CPython 3.11 hangs where a cancelled exception has left its request for a check."""
    subprocess.run([sys.executable, "-c", PROFILED.format(late=late)], check=True, timeout=60)


def test_a_full_disk_is_logged_once_and_ends_nothing(board, monkeypatch, caplog) -> None:
    tried = []

    def full(path, text):
        tried.append(path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(board_module, "replace_file", full)
    for number in range(3):
        progress(rollout_id=number)
        seen = len(tried)
        wait_until(lambda seen=seen: len(tried) > seen)
    assert [r.message for r in caplog.records] == ["waits are not published: [Errno 28] No space left on device"]


def test_a_report_that_cannot_be_written_hides_nothing(board, caplog) -> None:
    (board.run_dir / "stalls").write_text("not a directory")
    assert gave_up("x", 2.0) == "x: not done within 2 s"
    assert "no stall report" in caplog.text
