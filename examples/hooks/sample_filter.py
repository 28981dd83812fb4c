"""Choose the samples to train on at the end of a rollout, and inspect all groups, including dropped ones.

    slime train --config demo.yaml --rollout-sample-filter-path examples/hooks/sample_filter.py \
        --rollout-all-samples-process-path examples/hooks/sample_filter.py:process_all_samples

A removed sample keeps its place in the batch, with a loss mask of zeros, and its reward is left out of the statistics
of its group (THUDM/slime counts it).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime_core import Group


def sample_filter(args: Any, groups: list[Group]) -> None:
    """Train on the best and the worst sample of each group only."""
    for group in groups:
        scored = sorted((s for s in group if s.reward is not None), key=lambda s: s.get_reward_value(args))
        for sample in scored[1:-1]:
            sample.remove_sample = True


def process_all_samples(args: Any, all_groups: list[Group], data_source: Any) -> None:
    """Write one line per rollout: the data source, and the mean reward of each prompt."""
    rewards = {
        str(g[0].group_index): sum(s.get_reward_value(args) for s in g if s.reward is not None) / len(g)
        for g in all_groups
    }
    line = {"source": type(data_source).__name__, "mean_reward": rewards}
    with (Path(args.run_dir) / "prompts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
