"""Metrics of samples against closed forms and THUDM/slime's golden numbers."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from itertools import combinations
from statistics import NormalDist, fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_commands.eval.intervals import BOOTSTRAP, NONE, WILSON, bootstrap, estimate, estimates, wilson
from slime_runs.metrics import eval_metrics, rollout_metrics, sample_metrics
from slime_runs.sample_metrics import noted_metrics, pass_rates, tool_metrics
from slime_runs.scores import majority_at_k, pass_at_k, prompts_of, score_values, usual_ks

from slime_core.config import Args
from slime_core.sample import Sample

ARGS = Args(log_passrate=True, rollout_max_response_len=3)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_hit(correct: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(correct)))
    subsets = list(combinations(correct, k))
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_rates_use_each_groups_own_size() -> None:
    assert pass_rates([[1, 0], [1, 0, 0, 0]]) == pytest.approx({"pass@1": 0.375, "pass@2": (1.0 + 0.5) / 2})
    assert pass_rates([]) == {}


def _sample(group: int, reward: float, **more) -> Sample:
    sample = Sample(group_index=group, tokens=[1], reward=reward, status=Sample.Status.COMPLETED, **more)
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-0.5, -0.1], meta_info={"weight_version": "3"})
    sample.append_response_tokens(tokens=[9], trainable=False)
    return sample


def test_speculative_decoding_is_averaged_over_samples() -> None:
    """As THUDM/slime's: the mean of each sample's own rates; a sample of two calls counts once."""
    samples = [Sample(tokens=[1]) for _ in range(2)]
    calls = [(samples[0], 6, 8, 4, 2), (samples[0], 2, 8, 4, 2), (samples[1], 1, 4, 2, 3)]
    for sample, accepted, drafted, verified, tokens in calls:
        meta = {
            "spec_accept_token_num": accepted, "spec_draft_token_num": drafted, "spec_verify_ct": verified,
            "completion_tokens": tokens,
        }  # fmt: skip
        sample.append_response_tokens(tokens=[5] * tokens, log_probs=[-0.5] * tokens, meta_info=meta)
    metrics = rollout_metrics(ARGS, [samples], weight_version=0)
    assert metrics["rollout/spec_accept_rate"] == pytest.approx((8 / 16 + 1 / 4) / 2)
    assert metrics["rollout/spec_accept_length"] == pytest.approx((4 / 8 + 3 / 2) / 2)
    plain = [_sample(0, 1.0)]
    assert "rollout/spec_accept_rate" not in rollout_metrics(ARGS, [plain], weight_version=3)


def test_rollout_metrics() -> None:
    groups = [[_sample(0, 1.0), _sample(0, 0.0)], [_sample(1, 1.0), _sample(1, 1.0)]]
    groups[0][0].status = Sample.Status.TRUNCATED
    metrics = rollout_metrics(ARGS, groups, weight_version=5)
    assert metrics["rollout/raw_reward"] == 0.75
    assert metrics["rollout/response_len/mean"] == 2  # the tool token is not trained on
    assert metrics["rollout/truncated_ratio"] == 0.25
    assert metrics["rollout/zero_std/count_1.0"] == 1
    assert metrics["rollout/staleness"] == 2
    assert metrics["rollout/passrate/pass@1"] == 0.75


def test_multi_turn_and_correct_samples() -> None:
    args = ARGS.model_copy(update={"log_multi_turn": True, "log_correct_samples": True})
    groups = [[_sample(0, 1.0), _sample(0, 0.0)]]
    groups[0][0].metadata["round_number"] = 3
    groups[0][1].metadata["num_turns"] = 1
    groups[0][1].append_response_tokens(tokens=[7], log_probs=[-1.0])
    metrics = {k: v for k, v in rollout_metrics(args, groups, 3).items() if "multi_turn" in k or "/correct/" in k}
    prefix = "rollout/multi_turn/"
    assert {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)} == {
        "raw_response_length/response_length_mean": 3.5, "raw_response_length/response_length_max": 4,
        "raw_response_length/response_length_min": 3, "raw_response_length/response_length_clip_ratio": 1.0,
        "wo_obs_response_length/response_length_mean": 2.5, "wo_obs_response_length/response_length_max": 3,
        "wo_obs_response_length/response_length_min": 2, "multi_turn_metric/round_number_mean": 2,
        "multi_turn_metric/round_number_max": 3, "multi_turn_metric/round_number_min": 1,
    }  # fmt: skip
    assert metrics["rollout/correct/ratio"] == 0.5
    assert metrics["rollout/correct/response_len/mean"] == 2
    wrong = rollout_metrics(args, [[_sample(0, 0.0)]], 3)
    assert wrong["rollout/correct/ratio"] == 0
    assert "rollout/correct/response_len/mean" not in wrong


def test_what_samples_note_is_averaged_over_the_executions_that_have_it() -> None:
    def noted(value: object, rollout_id: int | None = None) -> Sample:
        return Sample(metadata={"sample_metrics": {"mine/x": value}}, rollout_id=rollout_id)

    samples = [noted(1.0, 7), noted(0.0, 7), noted(2.0), noted(None), noted(float("nan")), Sample()]
    assert noted_metrics(samples) == {"mine/x": 1.25}
    data = {"held": {"rewards": [0.0] * 6, "truncated": [False] * 6, "samples": samples}}
    assert eval_metrics(data)["eval/held/mine/x"] == 1.25


# -- tools, and parts of rewards -------------------------------------------------------------------------


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


# -- intervals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_has_the_published_limits(successes: int, trials: int, low: float, high: float) -> None:
    """Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I, method 3."""
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)
    assert wilson(trials - successes, trials) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilson_limits_are_where_the_score_test_just_rejects() -> None:
    z = NormalDist().inv_cdf(0.975)
    for limit in wilson(7, 40):
        assert abs(7 / 40 - limit) == pytest.approx(z * math.sqrt(limit * (1 - limit) / 40))
    with pytest.raises(ValueError, match="5 of 4 is no rate"):
        wilson(5, 4)


def test_the_bootstrap_agrees_with_the_normal_interval_of_many_prompts() -> None:
    values = list(np.random.default_rng(3).beta(0.5, 1.0, size=400))
    half = NormalDist().inv_cdf(0.975) * stdev(values) / math.sqrt(len(values))
    low, high = bootstrap(values, seed=1, resamples=20_000)
    assert (low, high) == pytest.approx((fmean(values) - half, fmean(values) + half), abs=0.06 * half)
    assert bootstrap(values, seed=1) == bootstrap(values, seed=1) != bootstrap(values, seed=2)


def test_which_method_is_chosen() -> None:
    found = estimates({"one": [0, 1, 1, 1], "several": [0.5, 1, 0.25, 1], "single": [0.5]}, seed=7)
    assert [e.method for e in found.values()] == [WILSON, BOOTSTRAP, NONE]
    assert (found["one"].low, found["one"].high) == wilson(3, 4)
    assert (found["single"].value, found["single"].low) == (0.5, None)
    assert estimate([0.0] * 10, seed=0).high == pytest.approx(wilson(0, 10)[1])
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"not finite: \[{value}\]"):
            estimate([1.0, value], seed=0)


# -- scores of evaluations -------------------------------------------------------------------------------

VOTES = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=8)


def vote(chosen: tuple[tuple[str | None, bool], ...], worth: dict[str, float]) -> float:
    counts = Counter(answer for answer, _ in chosen if answer is not None)
    winners = [a for a, n in counts.items() if n == max(counts.values())]
    return fmean(worth[a] for a in winners) if winners else 0.0


@given(votes=VOTES, data=st.data())
def test_majority_at_k_is_the_mean_over_all_choices_of_k(votes: list[tuple[str | None, bool]], data) -> None:
    k = data.draw(st.integers(1, len(votes)))
    worth = {a: fmean(float(c) for b, c in votes if b == a) for a in {a for a, _ in votes if a is not None}}
    expected = fmean(vote(chosen, worth) for chosen in itertools.combinations(votes, k))
    found = majority_at_k([a for a, _ in votes], [float(c) for _, c in votes], k)
    assert found == pytest.approx(expected)


def columns(n: int, prompts: int, **more: object) -> dict[str, object]:
    samples = [Sample(index=i, group_index=i // n, response="x") for i in range(n * prompts)]
    return {
        "rewards": [float(i % 2) for i in range(n * prompts)],
        "truncated": [False] * len(samples),
        "samples": samples,
        **more,
    }


def test_each_data_set_has_its_own_n_and_ks() -> None:
    sets = {"three": columns(3, 2, answers=list("ababab")), "one": columns(1, 4), "own": columns(6, 2, ks=[1, 3, 5])}
    metrics = eval_metrics(sets)
    assert {k for k in metrics if "@" in k} == {
        "eval/three-pass@1", "eval/three-pass@2", "eval/three-pass@3", "eval/three-majority@2",
        "eval/three-majority@3", "eval/one-pass@1", "eval/own-pass@1", "eval/own-pass@3", "eval/own-pass@5",
    }  # fmt: skip
    # rewards 0 1 0 | 1 0 1 of answers a b a | b a b: "a" is always wrong, "b" right
    assert metrics["eval/three-majority@3"] == 0.5
    assert usual_ks(6) == [1, 2, 4, 6]


def test_fan_out_siblings_are_one_execution_with_one_vote() -> None:
    samples = [Sample(group_index=0, rollout_id=5), Sample(group_index=0, rollout_id=5), Sample(group_index=0)]
    found = {"rewards": [1, 1, 0], "samples": samples, "answers": [None, "a", "b"]}
    (prompt,) = prompts_of(found)
    assert (prompt.rewards, prompt.answers) == ([1, 0], ["a", "b"])
    assert score_values(found)["pass@1"] == [0.5]
    assert score_values({"rewards": [1.0], "samples": []}) == {}
