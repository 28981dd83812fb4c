from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
import torch

from slime_core.config import Args
from slime_core.errors import RolloutError
from slime_core.estimator import EstimatorBase
from slime_core.launch.roles import _json
from slime_core.ops import group_normalize
from slime_core.protocols import RewardInputs
from slime_core.rollout.batch import make_batch
from slime_core.sample import Sample, SampleStatus, TrainBatch

ARGS = Args(reward_key=None, eps_clip=0.2)


class Centred(EstimatorBase):
    """Rewards minus the group mean."""

    def shape_rewards(self, args: Any, inputs: RewardInputs) -> list[float]:
        return group_normalize(inputs.rewards, inputs.group_indices, False, inputs.rollout_ids)


def sample(group: int | None = 0, reward: Any = 1.0, response: int = 2, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "group_index": group,
        "reward": reward,
        "tokens": [5, 6, *range(10, 10 + response)],
        "response_length": response,
        "status": SampleStatus.COMPLETED,
        "rollout_log_probs": [-0.5] * response,
    }
    return Sample(**{**values, **changes})


def build(groups: list[Any], **hooks: Any) -> TrainBatch:
    return make_batch(ARGS, 3, groups, Centred(ARGS), **hooks)


def test_columns() -> None:
    batch = build(
        [
            [sample(7, 1.0, index=4, rollout_id=4), sample(7, 0.0, 3, index=5, rollout_id=5, loss_mask=[1, 0, 1])],
            [sample(2, 5.0, index=9, rollout_id=9, status=SampleStatus.TRUNCATED, metadata={"raw_reward": 0.25})],
        ]
    )
    assert batch.rollout_id == 3
    assert batch.tokens == [[5, 6, 10, 11], [5, 6, 10, 11, 12], [5, 6, 10, 11]]
    assert batch.response_lengths == [2, 3, 2]
    assert batch.loss_masks == [[1, 1], [1, 0, 1], [1, 1]]
    assert batch.rewards == [0.5, -0.5, 0.0]
    assert batch.raw_rewards == [1.0, 0.0, 0.25]
    assert batch.truncated == [0, 0, 1]
    assert (batch.sample_indices, batch.group_indices, batch.rollout_ids) == ([4, 5, 9], [7, 7, 2], [4, 5, 9])
    assert batch.rollout_mask_sums == [2, 2, 2]
    assert batch.rollout_log_probs == [[-0.5] * 2, [-0.5] * 3, [-0.5] * 2]
    assert batch.teacher_log_probs is batch.source_names is batch.train_metadata is None


def test_groups_go_by_group_index_not_by_position() -> None:
    mixed = build([[sample(0, 1.0), sample(1, 10.0)], [sample(0, 0.0), sample(1, 30.0)]])
    assert mixed.rewards == [0.5, -10.0, -0.5, 10.0]


def test_an_adapter_is_compared_with_its_own_samples_of_a_group() -> None:
    scores: dict[str | None, tuple[float, float]] = {"solver": (1.0, 0.0), "critic": (10.0, 30.0), None: (2.0, 4.0)}
    talks = [
        sample(0, rewards[i], rollout_id=i, train_metadata=name and {"adapter": name})
        for i in range(2)
        for name, rewards in scores.items()
    ]
    args = Args(lora_rank=4, lora_adapters=["solver", "critic"])
    batch = make_batch(args, 0, [talks], Centred(args))
    assert (batch.rewards, batch.group_indices) == ([0.5, -10.0, -1.0, -0.5, 10.0, 1.0], [0] * 6)
    together = build([talks]).rewards  # the metadata are the user's without --lora-adapters
    assert together == [score - (13 / 3 + 34 / 3) / 2 for score in (1.0, 10.0, 2.0, 0.0, 30.0, 4.0)]


def test_mapping_rewards_use_the_reward_key() -> None:
    args = Args(reward_key="score")
    batch = make_batch(args, 0, [[sample(0, {"score": 3.0, "other": 1})]], EstimatorBase(args))
    assert batch.rewards == [3.0]
    with pytest.raises(RolloutError, match=r"keys \['score'\]; --reward-key must name one"):
        build([[sample(0, {"score": 3.0})]])


@pytest.mark.parametrize("status", [SampleStatus.FAILED, SampleStatus.ABORTED])
def test_a_failed_sample_without_reward_keeps_its_row_but_counts_nowhere(status: SampleStatus) -> None:
    batch = build([[sample(0, 1.0), sample(0, 0.0), sample(0, None, status=status)]])
    assert batch.rewards == [0.5, -0.5, 0.0]
    assert batch.loss_masks == [[1, 1], [1, 1], [0, 0]]
    assert batch.raw_rewards == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("status", [SampleStatus.FAILED, SampleStatus.ABORTED, SampleStatus.TRUNCATED])
def test_a_sample_that_was_scored_is_trained_on_whatever_its_status(status: SampleStatus) -> None:
    batch = build([[sample(0, 1.0), sample(0, 0.0, status=status)]])
    assert batch.rewards == [0.5, -0.5]
    assert batch.loss_masks == [[1, 1], [1, 1]]


def test_a_sample_without_a_response_becomes_a_masked_placeholder() -> None:
    failed = Sample(group_index=0, status=SampleStatus.FAILED)
    empty = sample(0, 0.0, 0, rollout_log_probs=[])
    batch = build([[sample(0, 1.0), failed, empty]])
    assert batch.tokens[1:] == [[0, 0], [6, 0]]
    assert batch.response_lengths == [2, 1, 1]
    assert batch.loss_masks[1:] == [[0], [0]]
    assert batch.rollout_log_probs is not None
    assert batch.rollout_log_probs[1:] == [[0.0], [0.0]]
    # An empty answer that was scored is an answer: it counts in its group.
    assert batch.rewards == [0.5, 0.0, -0.5]


@pytest.mark.parametrize("reward", [float("nan"), -1e300, 10**400])
@pytest.mark.parametrize("key", [None, "score"])
def test_a_reward_that_no_tensor_holds_costs_its_sample(reward: float, key: str | None) -> None:
    group = [sample(0, reward if i == 1 else float(i), index=i) for i in range(4)]
    for each in group if key else ():
        each.reward = {key: each.reward}
    args = Args(reward_key=key)
    batch = make_batch(args, 3, [group], Centred(args))
    assert group[1].status == SampleStatus.FAILED
    assert "is not finite" in group[1].metadata["failure"]["error"] or "1e+15" in group[1].metadata["failure"]["error"]
    assert batch.loss_masks[1] == [0] * len(batch.loss_masks[1])
    assert [batch.rewards[i] for i in (0, 2, 3)] == pytest.approx([0.0 - 5 / 3, 2 - 5 / 3, 3 - 5 / 3])
    with pytest.raises(RolloutError, match=r"cannot train on any of its 1 samples; sample 8: .*its reward is"):
        build([[sample(0, reward, index=8)]])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "rollout 4 returned no samples"),
        ([sample(0, None, index=8)], r"sample 8 \(group 0, completed\) has no reward"),
        ([sample(0, "good")], "reward 'good' is not a number"),
        (
            [sample(0, metadata={"raw_reward": "high"})],
            r"metadata\['raw_reward'\] returned a value that is not a number",
        ),
        ([sample(0, 1.0, tokens=[10, 11])], "no prompt tokens"),
        ([sample(0, 1.0, loss_mask=[1])], "loss_mask has 1 entries for 2 tokens"),
        ([sample(1), sample(2), sample(None)], r"mixes the groups \[1, 2\]"),
        (
            [sample(0), sample(0, index=6, rollout_log_probs=None)],
            r"rollout_log_probs is set on 1 of 2 trainable samples but not on samples \[6\]",
        ),
    ],
)
def test_what_cannot_be_trained_on_is_named(samples: list[Sample], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        build([samples] if samples else [])


def test_a_number_is_no_mapping_for_a_reward_key() -> None:
    for reward in (0.5, {"acc": "good"}):
        with pytest.raises(RolloutError, match="is not a mapping with a number for --reward-key 'acc'"):
            make_batch(Args(reward_key="acc"), 0, [[sample(0, reward)]], None)


# -- optional columns ------------------------------------------------------------------------------------


def test_samples_that_are_not_trained_on_may_lack_a_column() -> None:
    removed = sample(0, remove_sample=True, rollout_log_probs=None)
    # The first sample decides nothing.
    batch = build([[removed, sample(0, teacher_log_probs=[-1.0, -2.0])]])
    assert batch.rollout_log_probs == [[0.0, 0.0], [-0.5, -0.5]]
    assert batch.teacher_log_probs == [[0.0, 0.0], [-1.0, -2.0]]
    assert build([[sample(0, rollout_log_probs=None)]]).rollout_log_probs is None


# -- hooks -----------------------------------------------------------------------------------------------


def test_post_processing_replaces_the_estimators_shaping() -> None:
    def hook(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
        return [s.reward + 1 for s in samples], [s.reward * 10 for s in samples]  # type: ignore[operator]

    batch = build(
        [[sample(0, 1.0), sample(0, None, status=SampleStatus.FAILED), sample(0, 2.0)]], post_process_rewards=hook
    )
    assert batch.rewards == [10.0, 0.0, 20.0]
    assert batch.raw_rewards == [2.0, 0.0, 3.0]
    for returned, message in (
        (([0.0], [0.0]), "--custom-reward-post-process-path returned 1 rewards for 2 samples"),
        (([1.0] * 2, [1e300] * 2), r"path returned 1e\+300 for sample .* at most 1e\+18"),
    ):
        with pytest.raises(RolloutError, match=message):
            build([[sample(), sample()]], post_process_rewards=lambda a, s, returned=returned: returned)


def slime_columns(args: Any, samples: list[Sample]) -> dict[str, Any]:
    """What THUDM/slime's documentation asks a conversion to return."""
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [s.reward for s in samples],
        "raw_reward": [s.reward for s in samples],
        "truncated": [0 for _ in samples],
        "sample_indices": [s.index for s in samples],
        "loss_masks": [[1] * s.response_length for s in samples],
    }


def test_conversion_with_tensors_more_columns_and_another_number_of_rows() -> None:
    def hook(args: Any, samples: list[Sample]) -> dict[str, Any]:
        return {
            "tokens": [torch.tensor([1, 2, 3])] * 3,
            "response_lengths": np.array([2, 2, 1]),
            "rewards": torch.tensor([0.5, 0.25, 0.0]),
            "loss_masks": [np.array([1, 0]), [1, 1], [1]],
            "rollout_ids": [0, 0, 1],
            "metadata": [None, {"a": 1}, None],
            "difficulty": [1, 2, 3],
        }

    batch = build([[sample()]], convert_samples=hook)
    assert batch.tokens == [[1, 2, 3]] * 3
    assert batch.rewards == batch.raw_rewards == [0.5, 0.25, 0.0]
    assert batch.rollout_mask_sums == [3, 3, 1]
    assert batch.train_metadata == [None, {"a": 1}, None]
    assert batch.extras == {"difficulty": [1, 2, 3]}
    assert batch.select([2]).extras == {"difficulty": [3]}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tokens": None}, "missing column\\(s\\) tokens"),
        ({"rewards": [1.0]}, "every column needs one entry per sample; got lengths"),
        ({"loss_masks": [[1], [1, 1]]}, "row 0 of loss_masks has 1 entries for a response of 2 tokens"),
        ({"response_lengths": [4, 2], "loss_masks": [[1] * 4, [1] * 2]}, "row 0 has response length 4 and 4 tokens"),
    ],
)
def test_a_conversion_that_does_not_fit(change: dict[str, Any], complaint: str) -> None:
    def hook(args: Any, samples: list[Sample]) -> dict[str, Any]:
        return {**slime_columns(args, samples), **change}

    with pytest.raises(RolloutError, match=complaint):
        build([[sample(0, index=0), sample(0, index=1)]], convert_samples=hook)


def two_turns(group: int, rewards: tuple[float | None, float | None], state: str | None = None) -> Sample:
    """A turn of two tokens, one token of a tool, and a turn of one token."""
    made = Sample(group_index=group, tokens=[1, 2], reward=1.0, metadata={"level": group})
    made.append_response_tokens(None, [5, 6], [-0.1, -0.2])
    made.end_turn(rewards[0], role="solver", id="a", state=state)
    made.append_response_tokens(None, [9], trainable=False)
    made.append_response_tokens(None, [7], [-0.3], meta_info={"finish_reason": "stop"})
    if rewards[1] is not None:
        made.end_turn(rewards[1])
    return made


class OfTurns(EstimatorBase):
    """The reward of a turn minus the mean over the group's turns of its state."""

    def shape_turns(self, args: Any, inputs: RewardInputs) -> list[list[float]]:
        self.seen = inputs
        return [[10 * (reward or 0.0) for reward in row] for row in inputs.turn_rewards]


def test_the_estimator_sees_turns_states_components_and_metadata() -> None:
    estimator = OfTurns(ARGS)
    mapped = two_turns(0, (None, 2.0))
    mapped.reward = {"score": 0.25, "format": True, "words": 3, "note": "good", "broken": float("nan")}
    groups = [[two_turns(0, (0.5, None)), mapped, sample(0, remove_sample=True)], [two_turns(1, (1.0, 1.0), "home")]]
    args = ARGS.model_copy(update={"reward_key": "score"})
    for one in (groups[0][0], groups[0][2], groups[1][0]):
        one.reward = {"score": 1.0}
    batch = make_batch(args, 0, groups, estimator)
    seen = estimator.seen
    assert seen.turn_rewards == [[0.5, None], [None, 2.0], [1.0, 1.0]]
    assert [[(t.first, t.last, t.role, t.id) for t in row] for row in seen.turns] == [
        [(0, 2, "solver", "a"), (3, 4, "", "")]
    ] * 3
    first, second, third = seen.state_ids
    assert first == second  # same prompt, same tool output
    assert first[0] != first[1]
    assert third == ["home", first[1]]
    assert seen.components == [{}, {"format": 1.0, "words": 3.0}, {}]
    assert seen.metadata == [{"level": 0}, {"level": 0}, {"level": 1}]
    assert batch.turn_rewards == [[5.0, 0.0], [0.0, 20.0], [0.0], [10.0, 10.0]]
    assert batch.components[1] == {"format": 1.0, "words": 3.0}
    sent = orjson.loads(orjson.dumps(batch, default=_json))
    assert TrainBatch(**sent) == batch  # as other ranks get it


@pytest.mark.parametrize(
    ("values", "complaint"),
    [([[1.0], [1.0, 2.0]], "one per turn"), ([[1.0, 2.0], [1.0, float("inf")]], "expected finite numbers")],
)
def test_turn_rewards_that_do_not_fit_are_named(values: list[list[float]], complaint: str) -> None:
    class Wrong(EstimatorBase):
        def shape_turns(self, args: Any, inputs: RewardInputs) -> list[list[float]]:
            return values

    with pytest.raises(RolloutError, match=rf"Wrong.shape_turns returned .*{complaint}"):
        make_batch(ARGS, 0, [[two_turns(0, (0.5, None)), two_turns(0, (0.5, None))]], Wrong(ARGS))
