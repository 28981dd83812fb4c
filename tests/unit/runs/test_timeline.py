"""What `trace.jsonl` holds after a run, a kill, a full disk; and what recording costs."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slime_runs.files import read_lines
from slime_runs.timeline import FILE, Timeline, timed_stages

from slime_core.config import Args
from slime_core.sample import Sample, SampleStatus


def answered(tokens: int, *, index: int = 0, prompt: int = 3, version: int = 1) -> Sample:
    sample = Sample(prompt="p", tokens=[1] * (prompt + tokens), response_length=tokens)
    sample.group_index, sample.index = index // 2, index
    sample.status = SampleStatus.COMPLETED
    sample.token_weight_versions, sample.weight_versions = [version] * tokens, [str(version)]
    return sample


def asked_by(rollout_id: int = 0, *, evaluation: bool = False) -> Any:
    return SimpleNamespace(rollout_id=rollout_id, evaluation=evaluation)


def write(timeline: Timeline, sample: Sample, **changes: Any) -> None:
    now = timeline.now()
    timeline.sample([sample], (now - 2.5, now - 2, now - 1, now), 0, 0.25, asked_by(**changes))


def test_a_sample_is_one_line(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / FILE)
    used_tools = answered(5, index=7)
    used_tools.non_generation_time = 1.0
    write(timeline, used_tools)
    write(timeline, answered(4), evaluation=True)
    timeline.flush()
    first, second = read_lines(tmp_path / "trace.jsonl")
    assert {k: first[k] for k in ("e", "r", "g", "i", "p", "k", "n", "turns", "s", "v")} == {
        "e": "sample", "r": 0, "g": 3, "i": 7, "p": 3, "k": 0, "n": 5, "turns": 1, "s": "completed", "v": 1,
    }  # fmt: skip
    assert first["t"][2] - first["t"][0] == pytest.approx(2, abs=1e-3)
    assert (first["w"], first["o"]) == pytest.approx((0.5, 0.75), abs=1e-3)
    assert second.keys() - first.keys() == {"ev"}
    assert "o" not in second
    assert second["ev"] is True


@dataclass
class Stages:
    rollout: Any
    learner: Any
    weights: Any
    journal: Any


def run_args(tmp_path: Path, **changes: Any) -> Any:
    return Args(**{"trace": True, "run_dir": str(tmp_path), "rollout_batch_size": 4, **changes})


class Parts:
    started = False

    def start(self) -> None:
        self.started = True

    def generate(self, rollout_id: int) -> Any:
        batch = type("Batch", (), {"tokens": [[1, 2], [3]], "__len__": lambda self: 2})()
        return SimpleNamespace(batch=batch, metrics={"rollout/groups_drawn": 3.0, "rollout/other": 1.0})

    def train(self, rollout_id: int, batch: Any) -> dict[str, float]:
        return {"loss": 1.0}

    def push(self) -> dict[str, float]:
        return {}

    def save(self, rollout_id: int) -> None:
        raise OSError("no space")


def test_verbs_of_the_loop_are_recorded(tmp_path: Path) -> None:
    part = Parts()
    stages = timed_stages(Stages(part, part, part, part), run_args(tmp_path), 0)
    stages.rollout.start()
    assert part.started
    assert stages.rollout.generate(5).metrics["rollout/other"] == 1.0
    assert stages.learner.train(5, None) == {"loss": 1.0}
    stages.weights.push()
    with pytest.raises(OSError, match="no space"):
        stages.journal.save(5)
    run, rollout, train, push = read_lines(tmp_path / "trace.jsonl")
    assert run["settings"]["rollout_batch_size"] == 4
    assert {k: rollout[k] for k in ("e", "r", "samples", "tokens", "groups_drawn")} == {
        "e": "rollout", "r": 5, "samples": 2, "tokens": 3, "groups_drawn": 3.0,
    }  # fmt: skip
    assert (train["e"], train["r"], push["e"]) == ("train", 5, "push")


def test_coroutines_are_recorded_when_they_end(tmp_path: Path) -> None:
    class Slow:
        async def train(self, rollout_id: int, batch: Any) -> str:
            await asyncio.sleep(0.02)
            return "done"

    slow = Slow()
    stages = timed_stages(Stages(slow, slow, slow, slow), run_args(tmp_path), 0)
    assert asyncio.run(stages.learner.train(1, None)) == "done"
    _, train = read_lines(tmp_path / "trace.jsonl")
    assert train["t"][1] - train["t"][0] >= 0.019


def test_lines_torn_by_a_kill_are_left_out(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"e":"push","t":[0,1]}\n{"e":"tra')
    Timeline(tmp_path / FILE).begin(run_args(tmp_path), 3)
    events = list(read_lines(tmp_path / "trace.jsonl"))
    assert [e["e"] for e in events] == ["push", "run"]
    assert events[1]["start"] == 3


def test_samples_stop_at_the_limit_and_steps_go_on(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / FILE, limit=300)
    for _ in range(20):
        write(timeline, answered(2))
    timeline.span("train", timeline.now(), r=0)
    events = [e["e"] for e in read_lines(tmp_path / "trace.jsonl")]
    assert 1 <= events.count("sample") <= 4
    assert events[-1] == "train"


def test_a_disk_that_is_full_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    timeline = Timeline(tmp_path / "file" / FILE)
    with caplog.at_level(logging.WARNING):
        timeline.span("push", timeline.now())
        timeline.span("push", timeline.now())
    assert [r.getMessage().count("nothing more is recorded") for r in caplog.records] == [1]
    assert not timeline


def test_a_sample_costs_little(tmp_path: Path) -> None:
    timeline, sample = Timeline(tmp_path / FILE), answered(512)
    write(timeline, sample)
    best = float("inf")
    for _ in range(200):
        started = time.perf_counter()
        for _ in range(10):
            write(timeline, sample)
        best = min(best, (time.perf_counter() - started) / 10)
    timeline.flush()
    assert best < 200e-6, f"{best * 1e6:.0f} us per sample"
    size = len((tmp_path / FILE).read_bytes()) / 2001
    assert size < 250
    assert json.loads((tmp_path / FILE).read_text().splitlines()[0])["n"] == 512
