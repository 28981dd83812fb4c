"""Metrics of samples against closed forms and THUDM/slime's golden numbers."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_runs.metrics import eval_metrics, rollout_metrics
from slime_runs.sample_metrics import noted_metrics, pass_rates
from slime_runs.scores import pass_at_k

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


def test_replayed_tokens_are_counted() -> None:
    args = ARGS.model_copy(update={"use_rollout_routing_replay": True})
    known, unknown = Sample(tokens=[1, 2]), Sample(tokens=[1, 2])
    known.append_response_tokens(
        tokens=[3, 4], log_probs=[-0.5] * 2, meta_info={"routed_experts": [[[0, 1]], [[2, 0]], [[1, 2]]]}
    )
    known.append_response_tokens(tokens=[5], trainable=False)
    unknown.append_response_tokens(tokens=[3], log_probs=[-0.5])
    metrics = rollout_metrics(args, [[known, unknown]], weight_version=0)
    assert metrics["rollout/routing_replay_fraction"] == 3 / (4 + 2)


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
