"""Rewards by name in whole runs: combined, remote, and judged by our own server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from slime_embedded.engine.engine import EmbeddedEngine
from slime_serving.native import serve_in_loop
from slime_testing_contracts import ScriptedService

from slime_core import RewardCaller, Sample, resolve
from slime_core.config import Args
from tests.conftest import Slime, TinyRun
from tests.tiny_models import byte_tokenizer, make_model, make_text_model, one_thread

__all__ = ["byte_tokenizer", "make_model", "make_text_model", "one_thread"]
Models = Callable[..., tuple[Path, Any]]
SHORT: dict[str, Any] = {"eval_interval": None, "eval_prompt_data": None, "num_rollout": 1, "custom_rm_path": None}


def samples(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for f in sorted((run_dir / "rollouts").iterdir()) for x in f.read_text().splitlines()]


@pytest.fixture
def weighted(tiny: TinyRun, tmp_path: Path) -> Path:
    """A configuration file that sums three rewards, of a file, by a prefix, and with options of its own."""
    terms = [
        {"reward": str(tiny.root / "rm.py"), "name": "digits"},
        {"reward": "boxed_math", "weight": 2.0},
        {"reward": "length_penalty", "weight": 0.5},
    ]
    plugins = {"weighted_sum": {"terms": terms}, "length_penalty": {"shape": "linear", "target": 4}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"plugins": plugins}))
    return tmp_path / "run.yaml"


@pytest.mark.slow
def test_a_weighted_sum_keeps_its_terms(tiny: TinyRun, slime: Slime, tmp_path: Path, weighted: Path) -> None:
    argv = tiny.argv(tmp_path / "run", **SHORT, rm_type="weighted_sum", reward_key="score")
    done = slime("rollout", *argv, "--config", weighted)
    assert "without effect" not in done.stderr
    found = samples(tmp_path / "run")
    assert len(found) == 16
    for sample in found:
        terms = sample["reward"]
        penalty = -min(1.0, abs(sample["response_length"] - 4) / 4)
        assert terms["length_penalty"] == pytest.approx(penalty)
        assert terms["score"] == pytest.approx(terms["digits"] + 2.0 * terms["boxed_math"] + 0.5 * penalty)


def test_a_service_that_refuses_fails_samples_with_its_words(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    flaky = iter([(403, b"closed today"), *[0.5] * 99])
    with ScriptedService(lambda asked: next(flaky)) as service:
        slime("rollout", *tiny.argv(tmp_path / "run", **SHORT, rm_type="remote_rm", rm_url=service.url))
    found = samples(tmp_path / "run")
    failed = [s for s in found if s["status"] == "failed"]
    assert len(failed) == 1
    assert "403 Forbidden: closed today" in failed[0]["metadata"]["failure"]["error"]


async def test_a_judge_behind_our_own_server(make_text_model: Models) -> None:
    engine = EmbeddedEngine(Args(hf_checkpoint=str(make_text_model("qwen3", seed=1)[0]), num_threads=1))
    await engine.start()
    host, port, stop = await serve_in_loop(engine, "127.0.0.1", 0)
    try:
        options = {
            "url": f"http://{host}:{port}/v1", "model": "tiny", "template": "Rate {response}", "max_tokens": 8,
            "extract": "regex", "pattern": r"(?s).*", "unreadable": -1.0, "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        args = Args(reward_key=None, rm_timeout=30.0, plugins={"llm_judge": options})
        caller = RewardCaller(resolve("rewards", "llm_judge"), args)
        assert await caller.score([Sample(response="2"), Sample(response="3")]) == [-1.0, -1.0]
    finally:
        await stop()
        await engine.stop()


@pytest.mark.slow
def test_a_reward_of_another_project_and_what_check_says_of_it(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    code = (
        "def reward_func(completions, label, **kwargs):\n"
        "    return [float(c == x) for c, x in zip(completions, label)]\n"
    )
    (tmp_path / "theirs.py").write_text(code)
    argv = tiny.argv(tmp_path / "run", num_rollout=1, custom_rm_path=tmp_path / "theirs.py")
    done = slime("check", *argv)
    assert "theirs.py: called as TRL calls it, but" in done.stdout
    slime("rollout", *argv)
    found = samples(tmp_path / "run")
    assert {sample["reward"] for sample in found} <= {0.0, 1.0}
    assert {sample["status"] for sample in found} <= {"completed", "truncated"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["math", "exact", "deepscaler", "random"])
def test_a_built_in_reward_of_one_sample_with_group_rm(name: str, tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    argv = tiny.argv(tmp_path / "run", **SHORT, rm_type=name, group_rm=True)
    done = slime("train", *argv)
    assert "scores one 'sample' at a time, so --group-rm has no effect" in done.stderr
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["rollout/raw_reward"] >= 0.0
