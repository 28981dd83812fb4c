"""`--use-routing-replay` and `--use-rollout-routing-replay`: whole runs on a tiny mixture of experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Slime, TinyRun
from tests.run_files import trained


def test_the_engines_experts_are_replayed_in_every_rollout(slime: Slime, tiny_moe: TinyRun, tmp_path: Path) -> None:
    changes = {"use_rollout_routing_replay": True, "eval_interval": None, "eval_prompt_data": None}
    slime("train", *tiny_moe.argv(tmp_path / "run", **changes))
    rows = trained(tmp_path / "run")
    assert [row["rollout/routing_replay_fraction"] for row in rows] == [1.0] * 4
    # The second step of each rollout trains weights that the engine did not have.
    assert all(0 < row["train/routing_mismatch"] < 0.5 for row in rows)
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in rows)


@pytest.mark.slow
def test_bitwise_on_policy_with_experts(slime: Slime, tiny_moe: TinyRun, tmp_path: Path) -> None:
    slime("train", *tiny_moe.argv(tmp_path / "run", true_on_policy_mode=True, use_rollout_routing_replay=True))
    assert [row["train/train_rollout_logprob_abs_diff_max"] for row in trained(tmp_path / "run")] == [0.0] * 4


@pytest.mark.slow
def test_tool_tokens_route_freely_until_they_are_read(slime: Slime, tiny_moe: TinyRun, tmp_path: Path) -> None:
    generate = tmp_path / "gen.py"
    generate.write_text(
        "async def generate(args, sample, sampling_params, *, context):\n"
        "    for turn in range(2):\n"
        "        out = await context.engine.generate(sample.tokens, {**sampling_params, 'max_new_tokens': 4})\n"
        "        sample.append_response_tokens(args, out.token_ids, out.log_probs, meta_info=out.meta_info,\n"
        "                                      text=out.text)\n"
        "        sample.append_response_tokens(args, [5, 6, 7], trainable=False)\n"
        "    return sample\n"
    )
    flags = {"use_rollout_routing_replay": True, "num_rollout": 2, "eval_interval": None, "eval_prompt_data": None}
    slime("train", *tiny_moe.argv(tmp_path / "run", custom_generate_function_path=generate, **flags))
    # Nobody fed the last sampled token and two of the three tool tokens after it.
    fractions = [row["rollout/routing_replay_fraction"] for row in trained(tmp_path / "run")]
    assert all(0.7 < fraction < 1 for fraction in fractions)
