"""Rewards by name in whole runs: combined, remote, and judged by our own server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slime_embedded.engine.engine import EmbeddedEngine
from slime_serving.native import serve_in_loop
from slime_testing_contracts import ScriptedService

from slime_core import RewardCaller, Sample, resolve
from slime_core.config import Args
from tests.conftest import Slime, TinyRun
from tests.run_files import samples
from tests.tiny_models import byte_tokenizer, make_model, make_text_model, one_thread

__all__ = ["byte_tokenizer", "make_model", "make_text_model", "one_thread"]
Models = Callable[..., tuple[Path, Any]]
SHORT: dict[str, Any] = {"eval_interval": None, "eval_prompt_data": None, "num_rollout": 1, "custom_rm_path": None}


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
