"""A whole run through the endpoints, on the embedded engine and trainer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from slime_sandbox_local import isolation_here
from slime_testing_contracts.loop import run_loop

PROGRAMS = Path(__file__).with_name("agent_programs.py")
CLIENTS = ("openai", "anthropic")


@pytest.mark.skipif(not all(map(find_spec, CLIENTS)), reason=f"not installed: one of {', '.join(CLIENTS)}")
@pytest.mark.skipif(not isolation_here().complete, reason=str(isolation_here().missing))
def test_the_trainer_finds_the_engines_log_probs_on_every_sampled_token(tmp_path: Path) -> None:
    own = {"program": f"{PROGRAMS}:busy", "test_command": "cat done", "reward": "printed"}
    run = run_loop(
        tmp_path / "run",
        steps=1,
        custom_generate_function_path="agent",
        plugins={"agent": own},
        rollout_batch_size=1,
        n_samples_per_prompt=2,
        rollout_max_response_len=120,
        apply_chat_template=False,
    )
    assert max(run.metric("train/train_rollout_logprob_abs_diff_max")) < 1e-4
    assert run.metric("rollout/failed_ratio") == [0.0]
    for samples in run.samples:
        executions = {s.rollout_id for s in samples}
        assert len(executions) == 2
        assert len(samples) >= 3 * len(executions), "main line, its branch, and the sub-agent"
        assert {s.reward for s in samples} == {1.0}
        for sample in samples:
            sample.validate()
            agent = sample.metadata["agent"]
            assert agent["program"]["code"] == 0, agent
            assert agent["turns"] == 5
            sampled = sum(version >= 0 for version in sample.token_weight_versions)
            assert sum(sample.loss_mask or []) == sampled > 0
    assert any(s.metadata["agent"]["realigned"] for samples in run.samples for s in samples)
    assert any(s.metadata["agent"]["turns_trained"] > 1 for samples in run.samples for s in samples)
