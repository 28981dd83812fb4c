"""Whole runs with SGLang, as a user types them: the demo learns, a killed run goes on, a killed server comes back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from slime_runs.files import read_lines

from tests.backends.whole_runs import ROLLOUTS, Learned, demo, from_python, running, samples
from tests.conftest import SLIME, TinyRun
from tests.run_files import metrics
from tests.until import wait_until

pytestmark = [pytest.mark.backends, pytest.mark.timeout(1800)]

TINY_ROLLOUTS = 6
KILLED_AFTER = 3
"""Rollouts of the run that is killed; its checkpoints are made every second one."""
GATE = '''
import asyncio
from pathlib import Path

HERE = Path(__file__)


async def reward(args, sample, **kwargs):
    """Share of digits; those of one rollout wait until the test has seen what it waits for."""
    if sample.group_index >= {first}:
        HERE.with_name("waiting").touch()
        while not HERE.with_name("go").exists():
            await asyncio.sleep(0.05)
    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)
'''


# -- learning --------------------------------------------------------------------------------------


def test_the_demo_learns_with_two_servers_behind_a_router(embedded_demo: Learned, sglang_python: Path) -> None:
    cwd = embedded_demo.directory.parent
    flags = ["--rollout-engine", "sglang", "--device", "cpu", "--rollout-num-gpus", "2"]
    flags += ["--engine-python", str(sglang_python)]
    with running(demo(cwd, "sglang", *flags), cwd, cwd / "log") as run:
        run.until("rollout 0/")
        assert len(run.servers()) == 2
        printed = run.finish()
        assert run.left() == []
    assert "warning" not in run.log.read_text().lower()

    learned = Learned(cwd / "sglang", cwd / "sglang-samples/{rollout_id}.jsonl", metrics(cwd / "sglang"))
    (before, after), (theirs_before, theirs_after) = learned.scores(), embedded_demo.scores()
    print(f"held-out: {before} -> {after} with SGLang, {theirs_before} -> {theirs_after} with the embedded engine")
    assert before == pytest.approx(theirs_before, abs=0.01)  # greedy answers of the same weights
    assert before < 0.2
    assert after > 0.8
    # Other random numbers, so other answers: the two differ as two seeds do.
    assert after > theirs_after - 0.15
    assert "held-out accuracy" in printed

    trained = [line for line in learned.metrics if "train/loss" in line]
    assert len(trained) == ROLLOUTS
    for line in trained:
        assert line["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert line["train/train_rollout_logprob_abs_diff_max"] < 1e-3
        assert line["rollout/staleness"] == 0
        assert line["rollout/failed_ratio"] == 0
        assert line["engine/requests"] == 32 * 8 + (500 if line["step"] == 1 else 0), "and the evaluation before"
        assert line["engine/ready_workers"] == 2
        assert line["engine/quarantined"] == line["engine/wrong_version_answers"] == 0
    for rollout in range(ROLLOUTS):
        versions = {version for s in samples(learned.samples, rollout) for version in s["token_weight_versions"]}
        assert versions == {rollout + 1}
    logs = {path.relative_to(learned.directory / "engines").as_posix() for path in learned.directory.rglob("*.log")}
    assert logs == {"default/0.log", "default/1.log", "default/router.log"}
    # Both servers had work: the router is not a detour to one of them.
    for server in ("0", "1"):
        assert "POST /generate" in (learned.directory / f"engines/default/{server}.log").read_text()


def test_the_python_object_trains_as_with_the_embedded_engine(sglang_python: Path, tmp_path: Path) -> None:
    greedy = {"rollout_top_k": 1, "rewards_normalization": False}
    expected, answers = from_python(tmp_path / "embedded", **greedy)
    sglang = {"rollout_engine": "sglang", "engine_python": str(sglang_python)}
    found, same = from_python(tmp_path / "sglang", **greedy, **sglang)
    assert same == answers
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-6)


# -- killed, resumed, a server lost ----------------------------------------------------------------


@pytest.mark.smoke
def test_a_killed_run_leaves_no_server_and_goes_on_also_without_one(
    tiny: TinyRun, sglang_python: Path, tmp_path: Path
) -> None:
    """SIGKILL in the middle of a rollout; resumed, one server is killed and is back before the end.

    After each update, every tensor that a server has is compared with the one that was trained.
    """
    save, template = tmp_path / "run", tmp_path / "samples" / "{rollout_id}.jsonl"
    (tmp_path / "rm.py").write_text(GATE.format(first=4 * KILLED_AFTER))
    argv = tiny.argv(
        save, load=save, save_interval=2, num_rollout=TINY_ROLLOUTS, eval_interval=None, eval_prompt_data=None,
        rollout_engine="sglang", device="cpu", rollout_num_gpus=2, engine_python=sglang_python,
        use_fault_tolerance=True, rollout_health_check_interval=2, rollout_health_check_timeout=60,
        check_weight_update_equal=True,
        custom_rm_path=tmp_path / "rm.py", rm_timeout=900, save_debug_rollout_data=template,
    )  # fmt: skip
    with running([SLIME, "train", *argv], tmp_path, tmp_path / "killed.log") as run:
        run.until(f"rollout {KILLED_AFTER}/")
        wait_until((tmp_path / "waiting").exists, "samples of the next rollout", 120)
        servers = run.servers()
        run.kill()
    assert len(servers) == 2
    assert len(run.processes) > 2 * 3
    assert run.left() == []
    assert len(metrics(save)) == KILLED_AFTER

    (tmp_path / "waiting").unlink()
    with running([SLIME, "train", *argv], tmp_path, tmp_path / "resumed.log") as run:
        run.until(f"rollout {KILLED_AFTER}/")
        wait_until((tmp_path / "waiting").exists, "samples of the next rollout", 120)
        os.kill(run.servers()[0].pid, signal.SIGKILL)
        wait_until(lambda: "restarted" in _events(save), "the restart", 600)
        run.note()
        (tmp_path / "go").touch()
        printed = run.finish()
        assert run.left() == []
    assert "resumed from" in printed

    lines = metrics(save)
    assert [line["step"] for line in lines] == list(range(1, TINY_ROLLOUTS + 1))
    assert _events(save) == ["quarantined", "restarted"]
    assert sum(line["engine/restarts"] for line in lines) == 1
    assert sum(line["engine/quarantined"] for line in lines) == 1
    assert max(line["engine/recovery_time"] for line in lines) > 0
    assert lines[-1]["engine/ready_workers"] == 2
    assert max(line["train/train_rollout_logprob_abs_diff"] for line in lines) < 1e-5
    trained = [samples(template, rollout) for rollout in range(TINY_ROLLOUTS)]
    groups = [{s["group_index"] for s in of_one} for of_one in trained]
    assert [len(of_one) for of_one in groups] == [4] * TINY_ROLLOUTS
    assert sorted(g for of_one in groups for g in of_one) == list(range(4 * TINY_ROLLOUTS))
    versions = [{version for s in of_one for version in s["token_weight_versions"]} for of_one in trained]
    assert all(len(of_one) == 1 for of_one in versions), versions
    assert [min(of_one) for of_one in versions] == sorted({min(of_one) for of_one in versions})


def _events(run_dir: Path) -> list[str]:
    return [line["event"] for line in read_lines(run_dir / "events.jsonl")]
