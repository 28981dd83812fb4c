"""`slime train --profile`: where the time went is said, and written for Perfetto, in every mode and of a killed run."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slime_runs import Run
from slime_runs.profile import profile
from slime_runs.view.server import make_app
from slime_runs.view.watched import WatchedRun
from starlette.testclient import TestClient

from tests.conftest import TinyRun
from tests.made_run import MadeRun
from tests.until import until

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "one-step": {"async": True},
    "full": {"async": True, "async_mode": "full"},
    "ranks": {"actor_num_gpus_per_node": 2, "device": "cpu"},
}


def events(path: Path) -> list[dict[str, Any]]:
    """Of a trace; a killed run's has no end, which readers of the format do without."""
    text = path.read_text()
    found: list[dict[str, Any]] = json.loads(text if text.endswith("]\n") else text.rstrip().rstrip(",") + "]")
    return found


def overlapping(spans: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Neighbours on one lane of which the second begins before the first ends."""
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for span in sorted(spans, key=lambda span: float(span["ts"])):
        lanes.setdefault((span["pid"], span["tid"]), []).append(span)
    return [
        (a["name"], b["name"])
        for lane in lanes.values()
        for a, b in itertools.pairwise(lane)
        if a["ts"] + a["dur"] > b["ts"] + 2
    ]


@pytest.mark.parametrize("mode", ["sync", *(pytest.param(mode, marks=pytest.mark.slow) for mode in list(MODES)[1:])])
def test_a_run_says_where_its_time_went(
    mode: str, tiny: TinyRun, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    slime = request.getfixturevalue("slime_ranks" if mode == "ranks" else "slime")
    done = slime("train", *tiny.argv(tmp_path, run_dir=tmp_path, num_rollout=2, profile=True, **MODES[mode]))
    said = done.stdout[done.stdout.index("where the time went") :]
    for row in ("rollouts", "training", "actor_train", "weights", "evaluation", "checkpoints"):
        assert row in said
    spans = [event for event in events(tmp_path / "profile" / "trace.json") if event["ph"] == "X"]
    names = {span["name"] for span in spans if span["pid"] == 1}
    assert {"rollout 1", "rollout 2", "train 1", "train 2", "push", "eval 2", "save 2"} <= names
    passes = {(span["args"]["rank"], span["args"]["r"]) for span in spans if span["name"] == "actor_train"}
    assert passes == {(rank, r) for rank in range(2 if mode == "ranks" else 1) for r in (0, 1)}
    sampled = {span["args"]["i"] for span in spans if span["name"].startswith("sample ")}
    assert sampled >= set(range(32))
    assert overlapping([span for span in spans if span["pid"] != 1]) == []
    found = profile(Run(tmp_path))
    assert 0 < found["passes"]["actor_train"] <= found["stages"]["train"] <= found["seconds"]
    with TestClient(make_app(tmp_path), base_url="http://127.0.0.1") as page:
        assert page.get("trace").text == (tmp_path / "profile" / "trace.json").read_text()
        told = page.get("api/profile").json()
    assert dict(told["rows"])["  actor_train"] == found["passes"]["actor_train"]
    assert told["trace"] == (tmp_path / "profile" / "trace.json").stat().st_size
    if mode == "sync":
        assert sum(found["stages"].values()) <= found["seconds"]
        assert found["generating"] <= found["stages"]["rollout"]


@pytest.mark.slow
def test_a_killed_run_leaves_what_it_had_and_a_resumed_one_has_both_parts(
    tiny: TinyRun, slime: Any, tmp_path: Path
) -> None:
    argv = tiny.argv(tmp_path, run_dir=tmp_path, num_rollout=200, profile=True, eval_interval=None)
    trace = tmp_path / "profile" / "trace.json"
    run = subprocess.Popen(
        [sys.executable, "-m", "slime_core", "train", *argv], start_new_session=True, stdout=subprocess.DEVNULL
    )
    try:
        asyncio.run(until(lambda: trace.is_file() and '"train 2"' in trace.read_text(), "the second rollout"))
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    assert {"train 1", "train 2"} <= {event["name"] for event in events(trace)}
    assert profile(Run(tmp_path))["parts"] == 1
    commits = len(list((tmp_path / "checkpoints").glob("rollout_*")))
    assert commits
    again = tiny.argv(tmp_path, run_dir=tmp_path, num_rollout=4, profile=True, eval_interval=None, load=tmp_path)
    last = max(int(path.name.removeprefix("rollout_")) for path in (tmp_path / "checkpoints").glob("rollout_*"))
    slime("train", *again, *(["--num-rollout", str(last + 2)]))
    assert {"train 1", f"train {last + 2}"} <= {event["name"] for event in events(trace)}
    assert profile(Run(tmp_path))["parts"] == 2


def made_run(path: Path, config: str, *, train: float, save: float) -> Run:
    """Eight rollouts of two seconds, two of them generation, with these seconds of training and saving."""
    path.mkdir()
    (path / "config.yaml").write_text(config)
    lines: list[dict[str, Any]] = [{"e": "run", "t": 0.0, "start": 0, "settings": {}}]
    now = 0.0
    for r in range(8):
        for event, seconds in (("rollout", 2.0), ("train", train), ("save", save)):
            facts = {"samples": 16, "tokens": 16 * 40, "groups_drawn": 4} if event == "rollout" else {}
            lines.append({"e": event, "t": [now, now + seconds], "r": r, **facts})
            now += seconds
    (path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run(path)


def test_what_a_setting_wastes_is_said_where_numbers_support_it(tmp_path: Path) -> None:
    small = "micro_batch_size: 1  # flag\nsave_interval: 1  # flag\n"
    (said,) = profile(made_run(tmp_path / "a", small, train=8.0, save=0.1))["advice"]
    assert said == (
        "training took 79% of the time, in passes of 40 tokens: --micro-batch-size 1 (flag); without it they have up to"
        " 4096, and take less time for each token"
    )
    (said,) = profile(made_run(tmp_path / "b", small, train=1.0, save=9.0))["advice"]
    assert said == "checkpoints took 75% of the time: --save-interval 1 (flag); a larger one saves less often"
    large = "micro_batch_size: 64  # flag\nsave_interval: 1  # flag\n"
    assert profile(made_run(tmp_path / "c", large, train=8.0, save=1.0))["advice"] == []
    assert profile(made_run(tmp_path / "d", "micro_batch_size: 1  # default\n", train=8.0, save=1.0))["advice"] == []


def test_samples_of_a_long_timeline_are_added_up_as_far_as_they_are_kept(tmp_path: Path) -> None:
    run = WatchedRun(MadeRun(tmp_path, rollouts=2).write())
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b'{"e":"run","t":1795e6,"start":0}\n' + trace.read_bytes())
    told = profile(run)
    assert (told["generating"], told["scoring_alone"]) == pytest.approx((2 * 3.9, 2))
    _, _, more = trace.read_bytes().partition(b"\n")
    more = more.replace(b'"r":', b'"r":1').replace(b"179500", b"179501")  # rollouts 10 and 11, later
    with trace.open("ab") as file:
        file.write(more)
    told = profile(run)
    assert (told["generating"], told["scoring_alone"]) == pytest.approx((4 * 3.9, 4))
    with trace.open("ab") as file:
        file.write(b'{"e":"rollout","t":[1795020000.0,1795020001.0],"r":50}\n')
    assert profile(run)["advice"] == ["generating and scoring are known up to rollout 12 alone, and left out"]
    assert profile(run)["generating"] == 0
