"""512 multi-turn samples at once, of whose calls 1% each are slow, fail and hang: none is lost, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from slime_testing_contracts.tiny import tiny_model

from slime_core import Sample
from slime_core.config import load_settings
from slime_core.launch.prepare import prepare
from slime_core.rollout.stage import RolloutStage
from slime_core.workers import leftovers
from tests.integration import loaded

pytestmark = pytest.mark.slow

GROUPS, GROUP_SIZE = 64, 8
DEADLINE = 2.0
"""Of a call and of a step; what hangs has ended long before the test's own."""
HERE = "tests.integration.loaded"


def settings(folder: Path) -> Any:
    kinds = [
        {"generate_function_path": "tool_use", "max_turns": 4},
        {"generate_function_path": "multi_turn", "environment_path": f"{HERE}:Room"},
    ]
    rows = [{"input": [{"role": "user", "content": f"row {i}"}], "metadata": kinds[i % 2]} for i in range(GROUPS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = {
        "hf_checkpoint": tiny_model(), "prompt_data": folder / "rows.jsonl", "input_key": "input",
        "rollout_batch_size": GROUPS, "n_samples_per_prompt": GROUP_SIZE, "num_rollout": 1,
        "sglang_server_concurrency": GROUPS * GROUP_SIZE, "rollout_max_response_len": 200,
        "tool_call_parser": f"{HERE}:EveryTurn", "environment_step_timeout": DEADLINE,
        "custom_rm_path": "slime_testing_contracts.tiny:digits",
        "max_consecutive_failures": GROUPS * GROUP_SIZE, "num_threads": 1, "run_dir": folder / "run",
        "log_samples": "none",  # their thread ends with a run, and this is a stage alone
        "group_timeout": 400, "rollout_timeout": 400,
    }  # fmt: skip
    argv = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    # A third of all tokens ends a turn, so that a random model's turns are short.
    argv += ["--rollout-stop-token-ids", *map(str, range(0, 600, 3)), "--no-preflight"]
    argv += ["--tools-path", f"{HERE}:lookup", "--tools-path", f"{HERE}:blocking"]
    argv += ["--set", f"plugins.tool_use.tool_timeout={DEADLINE}"]
    return load_settings(argv, command="rollout")


@contextmanager
def processor_seconds() -> Iterator[dict[str, float]]:
    """Name of a task, or of a callback -> the most processor seconds that one turn of it took in its thread."""
    most: dict[str, float] = {}
    run = asyncio.events.Handle._run

    def measured(handle: Any) -> None:
        started = time.thread_time()
        run(handle)
        spent = time.thread_time() - started
        owner = getattr(handle._callback, "__self__", None) if not handle._cancelled else None
        name = owner.get_name() if isinstance(owner, asyncio.Task) else str(handle._callback)
        for key in (name,) if name == "slime-engine" else (name, "ours"):
            most[key] = max(most.get(key, 0.0), spent)

    gc.collect()
    gc.freeze()  # collecting what other tests left is no work of the loop
    asyncio.events.Handle._run = measured  # type: ignore[assignment,method-assign]
    try:
        yield most
    finally:
        asyncio.events.Handle._run = run  # type: ignore[method-assign]
        gc.unfreeze()


def there() -> dict[str, Any]:
    process = psutil.Process()
    return {
        "processes": {child.pid for child in process.children(recursive=True)},
        "sockets": Counter((c.type, str(c.laddr), str(c.raddr)) for c in process.net_connections("all")),
        # One per process watches for code that blocks event loops, from the first such loop on.
        "threads": Counter(thread.name for thread in threading.enumerate() if thread.name != "slime-loop-watch"),
    }


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("load")
    loaded.RELEASE.clear()
    loaded.FATES.clear()
    asyncio.run(asyncio.sleep(0))
    leftovers.watch()  # its program is there until this process ends
    before = there()
    stage: RolloutStage = prepare(settings(folder), learn=False).rollout_stage()
    try:
        stage.start()
        assert isinstance(stage._loop, asyncio.Runner)
        with processor_seconds() as seconds:
            groups, metrics = stage.generate_groups(0)
        tasks = {task.get_name() for task in asyncio.all_tasks(stage._loop.get_loop())}
        hanging = [thread for thread in threading.enumerate() if thread.name == "slime: tool"]
        events = [orjson.loads(line) for line in stage.ledger.snapshot().lines]
    finally:
        stage.stop()
        loaded.RELEASE.set()
    keepers = [thread for thread in threading.enumerate() if "_keep" in thread.name]  # of the templates' deadlines
    for thread in [*hanging, *keepers]:
        thread.join(60)
    return {
        "samples": [s for g in groups for s in g], "metrics": metrics, "tasks": tasks, "hanging": hanging,
        "before": before, "after": there(), "seconds": seconds, "events": events,
    }  # fmt: skip


def test_every_sample_ends_in_a_named_status(load: dict[str, Any]) -> None:
    samples: list[Sample] = load["samples"]
    assert sorted(s.index or 0 for s in samples) == list(range(GROUPS * GROUP_SIZE))
    assert {s.status for s in samples} <= {
        Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED
    }  # fmt: skip
    for sample in samples:
        sample.validate()
        if sample.status == Sample.Status.FAILED:
            assert any(word in sample.metadata["failure"]["error"] for word in ("did not", "not done", "is down"))
    assert sum(s.metadata.get("num_turns", 0) > 1 for s in samples) > len(samples) / 2, "they have several turns"


def test_the_ledger_has_every_group_once(load: dict[str, Any]) -> None:
    lives: dict[int, list[str]] = {}
    for event in load["events"]:
        if event.get("group") is not None:
            lives.setdefault(event["group"], []).append(event["event"])
    assert set(lives) == set(range(GROUPS))
    assert {tuple(life) for life in lives.values()} == {("drawn", "generating", "scored", "taken")}


def test_calls_are_cut_at_their_deadline_and_counted(load: dict[str, Any]) -> None:
    assert min(loaded.FATES[kind] for kind in ("slow", "fails", "hangs")) > 0, loaded.FATES
    stats = [
        counts for s in load["samples"] for name, counts in s.metadata.get("tool_stats", {}).items()
    ]  # fmt: skip
    calls, errors = sum(c["calls"] for c in stats), sum(c["errors"] for c in stats)
    assert calls > GROUPS * GROUP_SIZE
    assert 0 < errors < calls / 4, load["samples"][0].metadata["tool_messages"]
    for name in ("lookup", "blocking"):
        assert load["metrics"][f"rollout/tools/{name}/calls"] > 0.5
    assert load["hanging"], "plain functions that hang are left behind until they return"


def test_nothing_is_left(load: dict[str, Any]) -> None:
    assert load["tasks"] <= {"slime-engine"}
    before, after = load["before"], load["after"]
    assert after["processes"] <= before["processes"]
    assert after["sockets"] - before["sockets"] == Counter()
    assert after["threads"] - before["threads"] == Counter()
    assert not any(thread.is_alive() for thread in load["hanging"])


def test_the_event_loop_is_not_held_up(load: dict[str, Any], record_property: Callable[[str, Any], None]) -> None:
    metrics, ours = load["metrics"], load["seconds"]["ours"]
    assert 0 <= metrics["perf/event_loop_lag_p99"] <= metrics["perf/event_loop_lag_max"]
    assert metrics["perf/event_loop_lag_cpu_max"] <= metrics["perf/event_loop_lag_max"]
    record_property("measured", f"{ours * 1000:.0f} ms of processor time in one callback that is no engine step")
    worst = sorted(load["seconds"].items(), key=lambda item: -item[1])[:6]
    assert ours < 0.1, worst
