from __future__ import annotations

from slime_runs.metrics import sample_metrics
from slime_runs.sample_metrics import tool_metrics

from slime_core.sample import Sample


def test_further_counts_are_per_call_and_what_is_no_number_is_left_out() -> None:
    counts = {"calls": 4, "errors": 0, "seconds": 1.0, "waited": 6.0, "restarts": 1, "last": "x", "odd": float("nan")}
    samples = [Sample(metadata={"tool_stats": {"python": counts, "none": {"calls": 0}, "broken": 3}})]
    assert tool_metrics(samples) == {
        "tools/python/calls": 4.0,
        "tools/python/error_ratio": 0.0,
        "tools/python/seconds": 0.25,
        "tools/python/waited": 1.5,
        "tools/python/restarts": 0.25,
    }


def test_parts_of_rewards_have_curves_in_which_siblings_share_a_weight() -> None:
    samples = [
        Sample(rollout_id=1, reward_components={"format": 1.0}),
        Sample(rollout_id=1, reward_components={"format": 0.0, "answer": 1.0}),
        Sample(rollout_id=2, reward_components={"format": 0.0}),
        Sample(rollout_id=3),
    ]
    metrics = sample_metrics(samples)
    assert {name: metrics[name] for name in metrics if name.startswith("reward/")} == {
        "reward/answer": 1.0,
        "reward/format": 0.25,
    }
