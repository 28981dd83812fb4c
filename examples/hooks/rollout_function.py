"""A whole rollout of your own, and an evaluation of your own.

    slime train --config demo.yaml --rollout-function-path examples/hooks/rollout_function.py \
        --eval-function-path examples/hooks/rollout_function.py:evaluate

The first draws twice the prompts, answers all, and trains on the half whose rewards differ most: a group in which all
samples got the same teaches GRPO nothing. The second asks fixed questions. Without `--eval-function-path` the rollout
function evaluates as well; `--eval-function-path generate` is the built-in one.

A function that declares the keyword `context` is given `context.runner`, whose `run_group` generates, calls the sample
hooks, and scores. One without it, as in THUDM/slime, generates by itself (with `args.sglang_router_ip`), and may be a
plain function.
"""

from __future__ import annotations

import asyncio
from typing import Any

from slime_core import Group, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample

PROBES = ("1+1=?", "2+2=?", "3+3=?")


async def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False, *, context: Any
) -> RolloutFnTrainOutput:
    """`--rollout-batch-size` groups out of twice as many, ordered as they were drawn."""
    if evaluation:
        raise NotImplementedError("give --eval-function-path as well")
    params = {
        "temperature": args.rollout_temperature, "top_p": args.rollout_top_p, "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len, "no_stop_trim": True,
    }  # fmt: skip
    drawn = data_source.get_samples(2 * args.rollout_batch_size)
    runs = (context.runner.run_group(group, params, rollout_id=rollout_id) for group in drawn)
    groups = list(await asyncio.gather(*runs))
    best = sorted(range(len(groups)), key=lambda i: -_spread(args, groups[i]))[: args.rollout_batch_size]
    kept = [groups[i] for i in sorted(best)]
    left_out = [groups[i] for i in range(len(groups)) if i not in best]
    metrics = {"rollout/spread_kept": _mean_spread(args, kept), "rollout/spread_left_out": _mean_spread(args, left_out)}
    return RolloutFnTrainOutput(kept, metrics)


async def evaluate(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = True, *, context: Any
) -> RolloutFnEvalOutput:
    """The run's reward of greedy answers to `PROBES`; metrics are called `eval/probes...`."""
    params = {"temperature": 0.0, "max_new_tokens": args.rollout_max_response_len, "no_stop_trim": True}
    groups = [
        [Sample(group_index=i, index=i, prompt=[{"role": "user", "content": text}], label=text)]
        for i, text in enumerate(PROBES)
    ]
    runs = (context.runner.run_group(g, params, rollout_id=rollout_id, evaluation=True) for g in groups)
    samples = [sample for group in await asyncio.gather(*runs) for sample in group]
    columns = {
        "rewards": [0.0 if s.reward is None else s.get_reward_value(args) for s in samples],
        "truncated": [s.status == Sample.Status.TRUNCATED for s in samples],
        "samples": samples,
    }
    return RolloutFnEvalOutput({"probes": columns}, {"eval/probes_asked": float(len(samples))})


def _spread(args: Any, group: Group) -> float:
    rewards = [s.get_reward_value(args) for s in group if s.reward is not None]
    return max(rewards) - min(rewards) if rewards else 0.0


def _mean_spread(args: Any, groups: list[Group]) -> float:
    return sum(_spread(args, g) for g in groups) / len(groups)
