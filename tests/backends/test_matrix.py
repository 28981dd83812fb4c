"""The demo with every engine, launcher, loop and trainer: all of them fit together, or say why they do not."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.backends.whole_runs import Learned, Run, command_line, demo, samples
from tests.run_files import metrics

pytestmark = [pytest.mark.backends, pytest.mark.timeout(1200), pytest.mark.xdist_group("cluster")]
Slime = Callable[..., subprocess.CompletedProcess[str]]

ROLLOUTS = 3
SAMPLES = 32 * 8

ENGINES = {
    "embedded": (),
    "sglang": ("--rollout-engine", "sglang", "--rollout-num-gpus", "1", "--no-engine-router"),
}
LAUNCHERS = ("inline", "ray")
LOOPS: dict[str, tuple[str, ...]] = {
    "sync": (),
    "one-step": ("--async",),
    # Fewer requests at once than there is to generate, so that weights come while some are in flight.
    "full": ("--async", "--async-mode", "full", "--sglang-server-concurrency", "64", "--eval-in-background"),
}
SHARED_BY = {
    "sync": "--tensor-model-parallel-size",
    "one-step": "--pipeline-model-parallel-size",
    "full": "--tensor-model-parallel-size",
}
"""How two Megatron processes share the model."""
TRAINERS = ("embedded", "megatron")


def _trainer(name: str, loop: str) -> tuple[str, ...]:
    return () if name == "embedded" else ("--train-backend", name, SHARED_BY[loop], "2")


class Watched(Run):
    """A run whose actors are below the tests' Ray cluster, not below its command."""

    def __init__(self, argv: list[str], cwd: Path, log: Path) -> None:
        self._before = {process.pid for process in psutil.Process().children(recursive=True)}
        super().__init__(argv, cwd, log)

    def note(self) -> list[psutil.Process]:
        """Also actors, and what they have started."""
        below = super().note()
        for actor in psutil.Process().children(recursive=True):
            if actor.pid in self._before or not _is_actor(actor):
                continue
            found = [actor, *actor.children(recursive=True)]
            self.processes |= {process.pid: process for process in found}
            below += found
        return below


def _is_actor(process: psutil.Process) -> bool:
    title = command_line(process)
    return title.startswith("ray::") and "IDLE" not in title


@pytest.fixture
def run_demo(embedded_demo: Learned, request: pytest.FixtureRequest) -> Callable[..., tuple[Learned, str]]:
    """(name, engine, launcher, *flags) -> a finished run beside `embedded_demo`, and what it said."""
    cwd = embedded_demo.directory.parent

    def finished(name: str, engine: str, launcher: str, *flags: str) -> tuple[Learned, str]:
        own = [*ENGINES[engine], "--device", "cpu", *flags]
        if engine == "sglang":
            own += ["--engine-python", str(request.getfixturevalue("sglang_python"))]
        if launcher == "ray":
            own += ["--ray-address", request.getfixturevalue("cluster")]
        run = Watched(demo(cwd, name, *own), cwd, cwd / f"{name}.log")
        try:
            run.until("rollout 0/")
            assert len(run.servers()) == (engine == "sglang")
            actors = [process for process in run.processes.values() if _is_actor(process)]
            assert bool(actors) == (launcher == "ray")
            run.finish()
            assert run.left() == []
        finally:
            run.close()
        found = Learned(cwd / name, cwd / f"{name}-samples/{{rollout_id}}.jsonl", metrics(cwd / name))
        return found, run.log.read_text()

    return finished


# -- every pair ------------------------------------------------------------------------------------


CELLS = [
    ("sglang", "ray", "sync", "embedded"),
    ("embedded", "inline", "sync", "megatron"),
    ("sglang", "inline", "one-step", "embedded"),
    ("embedded", "ray", "one-step", "megatron"),
    ("sglang", "ray", "full", "megatron"),
    ("embedded", "inline", "full", "embedded"),
]
"""Any two of an engine, a launcher, a loop and a trainer meet in one of them."""


def test_every_pair_is_there() -> None:
    for (i, some), (j, others) in itertools.combinations(enumerate((ENGINES, LAUNCHERS, LOOPS, TRAINERS)), 2):
        assert {(cell[i], cell[j]) for cell in CELLS} == set(itertools.product(some, others))


def warnings_of(said: str) -> list[str]:
    """Return the warnings of a run, but for those of an event loop that a busy machine holds up."""
    return [line for line in said.splitlines() if "warning" in line.lower() and "event loop busy" not in line]


@pytest.mark.parametrize(("engine", "launcher", "loop", "trainer"), CELLS)
def test_trains(
    engine: str, launcher: str, loop: str, trainer: str, run_demo: Callable[..., tuple[Learned, str]], slime: Slime
) -> None:
    name = f"{engine}-{launcher}-{loop}-{trainer}"
    of = str(ROLLOUTS)
    sizes = ("--num-rollout", of, "--eval-interval", of, "--save-interval", of)
    done, said = run_demo(name, engine, launcher, *sizes, *LOOPS[loop], *_trainer(trainer, loop))
    assert warnings_of(said) == []
    assert "Traceback" not in said

    summary = json.loads((done.directory / "summary.json").read_text())
    assert summary["rollouts"] == ROLLOUTS
    assert summary["checkpoint"].endswith(f"rollout_{ROLLOUTS - 1:07d}")
    verified = slime("ledger", "verify", done.directory).stdout
    assert f"{ROLLOUTS * 32} trained on once in {ROLLOUTS} rollouts" in verified

    before, after = done.scores()
    print(f"{name}: held-out {before} -> {after}, {summary['wall_seconds']:.0f} s")
    assert before < 0.1
    assert after > before + 0.05
    assert summary["eval_before"] == before
    assert summary["eval_after"] == after

    lines = [line for line in done.metrics if "train/loss" in line]
    assert [line["step"] for line in lines] == list(range(1, ROLLOUTS + 1))
    for rollout, line in enumerate(lines):
        assert all(math.isfinite(value) for value in line.values()), line
        assert 0 <= line["rollout/raw_reward"] < 1
        assert line["rollout/failed_ratio"] == 0
        if engine == "sglang":
            assert line["engine/ready_workers"] == 1
            assert line["engine/quarantined"] == line["engine/wrong_version_answers"] == 0
        _check_ages(loop, rollout, line, samples(done.samples, rollout))
    if engine == "sglang":
        # Weights that come in flight end answers, whose rests are requests of their own.
        assert sum(line["engine/requests"] - line["engine/continued_requests"] for line in lines) >= ROLLOUTS * SAMPLES


def _check_ages(loop: str, rollout: int, line: dict[str, Any], trained: list[dict[str, Any]]) -> None:
    """Each token says which weights sampled it, as its loop promises, and the metrics say the same."""
    serves = rollout + 1
    assert len(trained) == SAMPLES
    assert all(len(s["token_weight_versions"]) == s["response_length"] > 0 for s in trained)
    ages = [serves - min(s["token_weight_versions"]) for s in trained]
    versions = {version for s in trained for version in s["token_weight_versions"]}
    if loop == "sync":
        assert versions == {serves}
    elif loop == "one-step":
        assert versions == {max(rollout, 1)}
    else:
        assert versions <= set(range(1, serves + 1))
        # A sample's weights never become older, and none of them is sampled by weights newer than those it trains.
        assert all(s["token_weight_versions"] == sorted(s["token_weight_versions"]) for s in trained)
    if loop != "sync":
        assert line["rollout/staleness/max"] == max(ages)
        assert line["rollout/staleness/mean"] == pytest.approx(sum(ages) / len(ages))
        assert sum(v for k, v in line.items() if k.startswith("rollout/staleness/hist_")) == SAMPLES
        assert 0 <= line["perf/trainer_idle_fraction"] < 1
    if max(ages) == 0:
        assert line["train/train_rollout_logprob_abs_diff"] < 1e-5
    elif min(ages) > 0:
        assert line["train/train_rollout_logprob_abs_diff"] > 1e-4


# -- learning while weights come in flight ---------------------------------------------------------


def test_learns_from_samples_of_several_versions(
    run_demo: Callable[..., tuple[Learned, str]], slime: Slime, embedded_demo: Learned
) -> None:
    """SGLang answers all the time; each update ends some answers (the way until 0.5.20), whose rests the new weights
    sample. The newer default, which keeps them, is in `test_fault_matrix.py`."""
    limits = ("--async-buffer-groups", "64", "--max-staleness", "2", "--use-tis", "--update-weight-pause-mode", "abort")
    sizes = ("--num-rollout", "8", "--eval-interval", "8", "--save-interval", "8")
    done, said = run_demo("in-flight", "sglang", "inline", *LOOPS["full"], *limits, *sizes)
    assert warnings_of(said) == []
    lines = [line for line in done.metrics if "train/loss" in line]
    trained = [sample for rollout in range(8) for sample in samples(done.samples, rollout)]
    mixed = sum(len(set(sample["token_weight_versions"])) > 1 for sample in trained)
    (before, after), (_, theirs) = done.scores(), embedded_demo.scores()
    continued = sum(line["engine/continued_requests"] for line in lines)
    print(f"held-out {before} -> {after}, {theirs} without --async; {mixed} samples of several versions, {continued=}")
    assert mixed > 0
    assert continued >= mixed
    assert max(line["rollout/staleness/max"] for line in lines) <= 2
    assert after > 0.5
    assert "8 rollouts" in slime("ledger", "verify", done.directory).stdout


# -- refused by design -----------------------------------------------------------------------------
