"""Worker processes: they score, they die alone, and none is left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from slime_rewards.processes.pool import WorkerError, WorkerPool
from slime_rewards.processes.worker import WorkerDied
from slime_runs.processes import runs

from slime_core.config import Args
from slime_core.errors import PluginError, PluginNotFoundError
from slime_core.plugins.adapters import Component, RewardCaller
from slime_core.plugins.resolve import resolve
from slime_core.sample import Sample
from slime_core.workers.call import DeadlineExceeded
from tests.until import until

REWARD = """
import asyncio, os, random, signal, subprocess, sys, time
from slime_core import RewardTraits, declares
CALLS = []

def reward(args, sample, **kwargs):
    CALLS.append(sample.index)
    print("a line of the user's")
    word, _, rest = sample.response.partition(" ")
    return globals()["do_" + word](args, sample, rest)

def do_add(args, sample, rest):
    sample.metadata["by"] = os.getpid()
    sample.teacher_log_probs = [-1.0]
    return float(rest) + args.offset

def do_own_loop(args, sample, rest): return asyncio.run(asyncio.sleep(0, 2.0))
def do_raise(args, sample, rest): raise KeyError(rest)
def do_lambda(args, sample, rest): sample.metadata["by"] = lambda: 1; return 1.0
def do_hang(args, sample, rest):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(rest, "w") as file: file.write(str(child.pid))
    time.sleep(600)
def do_daemon(args, sample, rest):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open(rest, "w") as file: file.write(str(child.pid))
    return 1.0
def do_sleep(args, sample, rest): time.sleep(float(rest)); return 1.0
def do_wait(args, sample, rest):
    while not os.path.exists(rest): time.sleep(0.01)
    return 1.0
def do_exit(args, sample, rest): os._exit(int(rest))
def do_sysexit(args, sample, rest): sys.exit(int(rest))
def do_signal(args, sample, rest): os.kill(os.getpid(), int(rest))
def do_fork_and_exit(args, sample, rest):
    if os.fork() == 0:
        time.sleep(600)
    os._exit(5)
def do_text(args, sample, rest): return "x"
def do_nan(args, sample, rest): return float("nan")
def do_none(args, sample, rest): return None
def do_close(args, sample, rest): os.closerange(3, 4096); time.sleep(600)
def do_noise(args, sample, rest):
    os.write(1, b"\\0" * 5000); os.write(2, b"pickle"); sys.stdout.write("no newline"); return 1.0
def do_random(args, sample, rest): return random.random()
def do_allocate(args, sample, rest): return float(len(bytearray(int(rest) << 20)))
def do_unpicklable(args, sample, rest): return {"score": 1.0, "f": lambda: 1}
def do_coroutine(args, sample, rest):
    async def later():
        await asyncio.sleep(0)
        return 4.0
    return later()

@declares(RewardTraits(execution="process"))
async def in_a_process(args, sample):
    sum(range(1000)); await asyncio.sleep(0)
    return float(os.getpid())

def batch(args, samples):
    for sample in samples: sample.metadata["seen"] = len(samples)
    return [float(s.index) for s in samples]

def short(args, samples): return [0.0]

class Asks:
    def __init__(self, args):
        self.args = args  # as the worker had them when it built this
    def __call__(self, args, sample):
        sample.metadata["address"] = getattr(self.args, "address", None)
        sample.metadata["plugins"] = self.args.plugins
        return float(self.args is args)

class Judge:
    built = 0
    def __init__(self, args):
        Judge.built += 1
        self.id = (os.getpid(), Judge.built)
    def compute_reward(self, prompts, responses):
        return [float(self.id[1]) + len(r) for r in responses]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "rm.py"
    path.write_text(REWARD)
    return path


ARGS = Args(offset=0.5, rm_timeout=20.0, reward_key=None, seed=7)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """One pool for all tests: each starts a worker only if the test before it ended one."""
    made = WorkerPool(ARGS, 1)
    yield made
    made.close()
    assert workers() == []


def workers(besides: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """Worker processes of this process that live, without those of other pools."""
    children = psutil.Process().children(recursive=True)
    living = [p for p in children if p not in besides and p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in living if _is_worker(p.cmdline())]


def _is_worker(words: list[str]) -> bool:
    return "slime_rewards.processes.scoring" in " ".join(words) and "--control" not in words  # that is its guard


def jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 s pass at once, for the pool and for the event loop."""
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 100)


def caller(pool: WorkerPool, spec: Any, **changes: Any) -> RewardCaller:
    args = ARGS.model_copy(update=changes)
    made = RewardCaller(resolve("rewards", str(spec)), args, workers=lambda: pool, spec=str(spec))
    assert made.execution == "process"
    return made


def say(text: str, index: int = 0) -> Sample:
    return Sample(index=index, response=text, tokens=[1, 2], response_length=1, status=Sample.Status.COMPLETED)


async def test_settings_that_are_set_later_arrive_when_told(file: Path) -> None:
    """As an engine's address, which is known after the workers have loaded the reward."""
    args = ARGS.model_copy(update={"address": None})
    pool, others = WorkerPool(args, 1), workers()
    try:
        call = caller(pool, f"{file}:Asks")
        await call.start()
        pid = [worker.pid for worker in workers(others)]
        options = {"asks": {"loudly": True}}
        own = call.under(args.model_copy(update={"plugins": options}))
        asked = [say("own"), say("own, later")]
        assert await own.score(asked[:1]) == [1.0]
        args.address = {"judge": ("127.0.0.1", 5)}
        samples = [say("1"), say("2"), say("3")]
        await call.score(samples[:1])
        pool.settings_changed()
        assert await call.score(samples[1:2]) == [1.0]
        assert await own.score(asked[1:]) == [1.0]
        assert [worker.pid for worker in workers(others)] == pid
        os.kill(pid[0], signal.SIGKILL)  # a replacement has them from the start
        await call.score(samples[2:])
    finally:
        pool.close()
    assert [s.metadata["address"] for s in samples] == [None, args.address, args.address]
    assert [s.metadata["address"] for s in asked] == [None, args.address]
    assert [s.metadata["plugins"] for s in (*samples, *asked)] == [{}, {}, {}, options, options]


async def test_scores_in_one_process_and_brings_changes_back(pool: WorkerPool, file: Path) -> None:
    call = caller(pool, file)
    samples = [say(f"add {i}", i) for i in range(3)]
    assert [await call.score([s]) for s in samples] == [[0.5], [1.5], [2.5]]
    pids = {s.metadata["by"] for s in samples}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert samples[0].teacher_log_probs == [-1.0]


WRONG: list[tuple[str, type[BaseException], str]] = [
    ("raise it", WorkerError, "^'it'$"),
    ("lambda", PluginError, r"wrote to its sample cannot be sent back.*execution='thread'"),
    ("sysexit 3", PluginError, r"raised SystemExit\(3\)"),
    ("text", PluginError, "returned str for sample 0"),
    ("nan", PluginError, "returned nan for sample 0"),
    ("none", PluginError, "returned NoneType for sample 0"),
    ("unknown", WorkerError, "do_unknown"),
    ("exit 3", WorkerDied, "ended with exit status 3"),
]
"""A word to the reward, and what its call raises."""
ALSO_DIES: list[tuple[str, type[BaseException], str]] = [
    ("signal 9", WorkerDied, r"signal SIGKILL \(out of memory\?\)"),
    ("close", WorkerDied, "closed its connection"),
    ("exit 0", WorkerDied, "ended with exit status 0"),
    ("signal 11", WorkerDied, "signal SIGSEGV"),
    ("fork_and_exit", WorkerDied, "exit status 5"),
]


@pytest.mark.parametrize("wrong", [WRONG, pytest.param(ALSO_DIES, marks=pytest.mark.slow)], ids=["each", "dies"])
async def test_what_goes_wrong_is_the_calls_alone(
    pool: WorkerPool, file: Path, wrong: list[tuple[str, type[BaseException], str]]
) -> None:
    for text, error, message in wrong:
        call = caller(pool, file)
        with pytest.raises(error, match=message) as caught:
            await call.score([say(text)])
        assert await call.score([say("add 1")]) == [1.5], text
        if text == "raise it":
            assert type(caught.value).__name__ == "KeyError"
            assert f'File "{file}"' in caught.value.worker_traceback
            assert "workers/main" not in caught.value.worker_traceback


async def test_a_reward_that_cannot_be_sent_back(file: Path) -> None:
    """Return what only the way back refuses: a function that shapes rewards takes anything.

    This process has more files open than `select.select` takes.
    """
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    pool = WorkerPool(ARGS.model_copy(update={"custom_reward_post_process_path": "shape.py"}), 1)
    try:
        with pytest.raises(Exception, match="pickle"):
            await caller(pool, file).score([say("unpicklable")])
        assert await caller(pool, file).score([say("add 1")]) == [1.5]
    finally:
        pool.close()
        for descriptor in held:
            os.close(descriptor)


async def test_a_call_that_overruns_is_killed_with_its_children(
    pool: WorkerPool, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = caller(pool, file, rm_timeout=60.0)
    await call.start()
    (first,) = workers()
    child = tmp_path / "child"
    scoring = asyncio.create_task(call.score([say(f"hang {child}")]))
    await until(lambda: child.exists() and child.read_text(), "the reward to begin")
    jump(monkeypatch)
    with pytest.raises(DeadlineExceeded, match=r"no answer within --rm-timeout 60.0 s"):
        async with asyncio.timeout(60):
            await scoring
    assert not psutil.pid_exists(first.pid)
    await until(lambda: not runs(int(child.read_text())), "the end of the reward's own child")
    assert await call.score([say("add 1")]) == [1.5]


async def test_waiting_for_a_worker_does_not_count(
    pool: WorkerPool, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds, call = caller(pool, file, rm_timeout=None), caller(pool, file, rm_timeout=60.0)
    await call.start()
    holder = asyncio.create_task(holds.score([say(f"wait {tmp_path / 'release'}")]))
    waiting = [asyncio.create_task(call.score([say(f"add {i}", i)])) for i in range(8)]
    await until(lambda: pool._queue.qsize() == 8, "the worker to take the first call")
    jump(monkeypatch)
    (tmp_path / "release").touch()
    assert await asyncio.gather(holder, *waiting) == [[1.0], *([i + 0.5] for i in range(8))]


@pytest.mark.slow
async def test_calls_written_at_once_have_their_own_fates(
    pool: WorkerPool, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that hangs, ends or is killed with its process loses nothing but itself, once."""
    call = caller(pool, file, rm_timeout=1.0)
    await call.score([say("add 1")])
    holder = asyncio.create_task(caller(pool, file, rm_timeout=None).score([say(f"wait {tmp_path / 'release'}")]))
    await until(lambda: pool._idle == 0, "the worker to take the first call")
    words = [
        "add 1", "raise why", "lambda", "add 2", "exit 3", "add 3", "sleep 600", "add 4", "signal 9", "add 5",
    ]  # fmt: skip
    sent = [asyncio.create_task(call.score([say(word, i)])) for i, word in enumerate(words)]
    await until(lambda: pool._queue.qsize() == len(words), "all calls to wait")
    monkeypatch.setattr("slime_rewards.processes.pool._BATCH_S", 1e9)  # the one that holds was no fast one
    written, run = list[int](), pool._run

    def counting(calls: Any, process: Any) -> Any:
        written.append(len(calls))
        return run(calls, process)

    monkeypatch.setattr(pool, "_run", counting)
    (tmp_path / "release").touch()
    found = await asyncio.gather(holder, *sent, return_exceptions=True)
    assert written[0] == len(words)
    shown = [value[0] if isinstance(value, list) else type(value).__name__ for value in found[1:]]
    assert shown == [
        1.5, "KeyError", "PluginError", 2.5, "WorkerDied", 3.5, "DeadlineExceeded", 4.5, "WorkerDied", 5.5,
    ]  # fmt: skip


async def test_a_call_whose_worker_is_killed_from_outside_is_made_again(
    pool: WorkerPool, file: Path, tmp_path: Path
) -> None:
    """With the same random numbers; one that kills its worker itself fails the second time."""
    call = caller(pool, file, rm_timeout=None)
    whole = await call.score([say("random", 3)])
    (first,) = workers()
    scoring = asyncio.create_task(call.score([say(f"wait {tmp_path / 'release'}", 3)]))
    await until(lambda: pool._idle == 0, "the call to be taken")
    first.kill()
    (tmp_path / "release").touch()
    assert await scoring == [1.0]
    (second,) = workers()
    assert second.pid != first.pid
    assert await call.score([say("random", 3)]) == whole


async def test_what_a_reward_starts_in_the_background_ends_with_its_worker(file: Path, tmp_path: Path) -> None:
    """Also in a session of its own, which no signal to a group reaches."""
    pool, child = WorkerPool(ARGS, 1), tmp_path / "child"
    try:
        assert await caller(pool, file).score([say(f"daemon {child}")]) == [1.0]
        pid = int(child.read_text())
        assert runs(pid)
    finally:
        pool.close()
    assert not runs(pid)


async def test_every_form(pool: WorkerPool, file: Path) -> None:
    for _ in range(2):
        assert await caller(pool, file).score([say("coroutine")]) == [4.0]
        assert await caller(pool, file).score([say("own_loop")]) == [2.0]
    assert await caller(pool, file).score([say("noise")]) == [1.0], "prints do not reach the protocol"
    (pid,) = await caller(pool, f"{file}:in_a_process").score([say("")])
    assert int(pid) in {p.pid for p in workers()}
    samples = [say("", i) for i in range(3)]
    assert await caller(pool, f"{file}:batch").score(samples) == [0.0, 1.0, 2.0]
    assert [s.metadata["seen"] for s in samples] == [3, 3, 3]
    with pytest.raises(PluginError, match="returned list of 1; expected a list of 3 rewards"):
        await caller(pool, f"{file}:short").score(samples)
    judge = caller(pool, f"{file}:Judge")
    assert judge.batched
    assert await judge.score([say("a"), say("ab")]) == [2.0, 3.0]
    assert await judge.score([say("a")]) == [2.0]  # the same instance
    with pytest.raises(PluginError, match=r"sample 0 cannot be sent .*execution='thread'"):
        await caller(pool, file).score([Sample(index=0, metadata={"handle": lambda: 1})])


async def test_a_component_that_does_not_load_says_why(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="no file"):
        await pool.score(Component(str(tmp_path / "absent.py")), [say("")], False, 5.0)
    (tmp_path / "fatal.py").write_text("import os; os._exit(9)\ndef reward(args, sample): return 1.0\n")
    for _ in range(2):
        with pytest.raises(WorkerDied, match="exit status 9"):
            await pool.score(Component(str(tmp_path / "fatal.py")), [say("")], False, 5.0)
    with pytest.raises(PluginNotFoundError):
        resolve("rewards", "nobody_has_this")


async def test_a_cancelled_call_frees_its_worker(pool: WorkerPool, file: Path) -> None:
    call = caller(pool, file, rm_timeout=None)
    await call.start()
    task = asyncio.create_task(call.score([say("sleep 600")]))
    running = time.monotonic() + 60
    while not any(p.cpu_times().user and pool._idle == 0 for p in workers()):
        assert time.monotonic() < running
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(call.score([say("add 1")]), 60) == [1.5]


async def test_memory_can_be_bounded(file: Path) -> None:
    pool = WorkerPool(ARGS, 1, memory_limit=1.0)
    try:
        call = caller(pool, file)
        with pytest.raises(WorkerError) as caught:
            await call.score([say("allocate 4096")])
        assert type(caught.value).__name__ == "MemoryError"
        assert await call.score([say("allocate 1")]) == [float(1 << 20)]
    finally:
        pool.close()


async def test_closing_ends_calls_that_run_and_wait(file: Path) -> None:
    pool, others = WorkerPool(ARGS, 1), workers()
    call = caller(pool, file)
    await call.start()
    tasks = [asyncio.create_task(call.score([say("sleep 600", i)])) for i in range(2)]
    await asyncio.sleep(0.1)
    await asyncio.to_thread(pool.close)
    done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert all(isinstance(error, WorkerDied | PluginError) for error in done)
    assert workers(others) == []
    with pytest.raises(PluginError, match="stopped"):
        await call.score([say("add 1")])
    pool.close()
