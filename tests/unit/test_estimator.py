from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from slime_core.config import Args
from slime_core.errors import PluginError
from slime_core.estimator import EstimatorBase, with_advantages
from slime_core.learning.passes import compute_advantages
from slime_core.learning.tensors import TrainTensors
from slime_core.protocols import AdvantageInputs, LossInputs, RewardInputs
from slime_core.sample import TrainBatch
from slime_core.sample.provenance import TurnSpan

ARGS = Args(eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=None)


def advantage_inputs(rewards: list[float], lengths: list[int]) -> AdvantageInputs:
    return AdvantageInputs(
        rewards=torch.tensor(rewards),
        response_lengths=lengths,
        group_indices=[0] * len(lengths),
        rollout_ids=list(range(len(lengths))),
        loss_masks=[torch.ones(n) for n in lengths],
        kl=[torch.zeros(n) for n in lengths],
    )


def loss_inputs(ratios: list[float], advantages: list[float], **changes: Any) -> LossInputs:
    log_probs = torch.log(torch.tensor(ratios)) - 5.0
    n = len(ratios)
    values: dict[str, Any] = {"loss_mask": torch.ones(n), "sample_lengths": [n], **changes}
    return LossInputs(log_probs, torch.full((n,), -5.0), torch.tensor(advantages), **values)


def test_policy_loss_golden() -> None:
    outputs = EstimatorBase(ARGS).policy_loss(ARGS, loss_inputs([1.5, 0.5, 1.5, 0.5, 1.0], [1.0, 1.0, -1.0, -1.0, 2.0]))
    assert outputs.loss.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8, -2.0], abs=1e-5)
    assert outputs.metrics["pg_clipfrac"].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]
    expected = (-torch.log(torch.tensor([1.5, 0.5, 1.5, 0.5, 1.0]))).tolist()
    assert outputs.metrics["ppo_kl"].tolist() == pytest.approx(expected, abs=1e-5)
    assert not any(metric.requires_grad for metric in outputs.metrics.values())


def test_sequence_level_ratio() -> None:
    class Sequence(EstimatorBase):
        ratio_level: ClassVar[Any] = "sequence"

    inputs = loss_inputs([1.1, 1.3, 9.0], [1.0] * 3, loss_mask=torch.tensor([1.0, 1.0, 0.0]))
    ratio = (1.1 * 1.3) ** 0.5
    outputs = Sequence(ARGS).policy_loss(ARGS, inputs)
    assert outputs.loss.tolist() == pytest.approx([-ratio] * 3, abs=1e-5)


class Doubling(EstimatorBase):
    needs_values: ClassVar[bool] = True
    needs_greedy_baseline: ClassVar[bool] = True
    requires: ClassVar[dict[str, Any]] = {"normalize_advantages": True}  # type: ignore[assignment]

    def shape_rewards(self, args: Any, inputs: RewardInputs) -> list[float]:
        return [2 * r for r in inputs.rewards]


def test_a_custom_function_replaces_the_advantages_only() -> None:
    def fn(args: Any, rollout_data: dict[str, Any]) -> None:
        assert rollout_data["response_lengths"] == [2, 1]
        assert "values" not in rollout_data
        rollout_data["advantages"] = [r * m for r, m in zip(rollout_data["rewards"], rollout_data["loss_masks"])]
        rollout_data["returns"] = [[0, 1], [2]]

    estimator = with_advantages(Doubling, fn, "--flag mine.py:fn")(ARGS)
    assert estimator.needs_values
    assert estimator.needs_log_probs
    assert estimator.requires == {"normalize_advantages": True}
    assert estimator.needs_greedy_baseline
    assert estimator.shape_rewards(ARGS, RewardInputs([1.0], [0], [0], [5], [False])) == [2.0]
    result = estimator.advantages(ARGS, advantage_inputs([1.5, -1.0], [2, 1]))
    assert [a.tolist() for a in result.advantages] == [[1.5, 1.5], [-1.0]]
    assert [r.tolist() for r in result.returns] == [[0.0, 1.0], [2.0]]
    inputs = loss_inputs([1.5], [1.0])
    assert torch.equal(estimator.policy_loss(ARGS, inputs).loss, Doubling(ARGS).policy_loss(ARGS, inputs).loss)


def test_a_custom_function_gets_the_dictionary_of_thudm_slime() -> None:
    seen: dict[str, Any] = {}

    def fn(args: Any, rollout_data: dict[str, Any]) -> None:
        seen.update(rollout_data)
        rollout_data["advantages"] = rollout_data["returns"] = rollout_data["kl"]

    batch = TrainBatch(
        rollout_id=1, tokens=[[1, 2], [3, 4, 5]], response_lengths=[1, 2], loss_masks=[[1], [1, 0]],
        rewards=[0.5, -0.5], raw_rewards=[1.0, 0.0], truncated=[0, 1], sample_indices=[5, 6], group_indices=[0, 0],
        rollout_ids=[5, 6], rollout_mask_sums=[1, 1], train_metadata=[{"level": 2}, None],
        rollout_log_probs=[[-0.5], [-0.25, -0.125]],
    )  # fmt: skip
    args = ARGS.model_copy(update={"kl_coef": 0.0, "use_opd": False, "normalize_advantages": False})
    tensors = TrainTensors.from_batch(batch, torch.device("cpu"))
    compute_advantages(args, batch, tensors, with_advantages(EstimatorBase, fn, "mine.py:fn")(ARGS), lambda x: x)
    assert [row.tolist() for row in seen["tokens"]] == [[1, 2], [3, 4, 5]]
    assert [float(reward) for reward in seen["rewards"]] == [0.5, -0.5]
    assert [row.tolist() for row in seen["loss_masks"]] == [[1.0], [1.0, 0.0]]
    assert [row.tolist() for row in seen["rollout_log_probs"]] == [[-0.5], [-0.25, -0.125]]
    plain = {
        "raw_reward": [1.0, 0.0], "truncated": [0, 1], "metadata": [{"level": 2}, {}], "total_lengths": [2, 3],
        "response_lengths": [1, 2], "sample_indices": [5, 6], "rollout_ids": [5, 6], "rollout_mask_sums": [1, 1],
        "turn_rewards": [[0.0], [0.0]], "components": [{}, {}],
    }  # fmt: skip
    assert {name: seen[name] for name in plain} == plain


def test_values_of_turns_are_spread_over_their_tokens() -> None:
    inputs = advantage_inputs([0.0, 0.0], [6, 1])
    inputs.turns = [[TurnSpan(0, 2), TurnSpan(3, 3), TurnSpan(4, 6)], []]
    assert [part.tolist() for part in inputs.over_turns([[1.0, 2.0, 3.0], []])] == [[1.0, 1.0, 0.0, 0.0, 3.0, 3.0], [0]]
    numbers = inputs.over_turns([range(len(row)) for row in inputs.turns], outside=-1)
    assert [part.tolist() for part in numbers] == [[0, 0, -1, -1, 2, 2], [-1]]


@pytest.mark.parametrize(
    ("advantages", "complaint"),
    [
        (None, r'did not set rollout_data\["advantages"\]'),
        ([[1.0, 2.0]], "expected one tensor per sample"),
        ([[1.0], [1.0]], "expected one tensor per sample"),
    ],
)
def test_a_custom_function_that_leaves_something_out(advantages: Any, complaint: str) -> None:
    def fn(args: Any, rollout_data: dict[str, Any]) -> None:
        if advantages is not None:
            rollout_data["advantages"] = rollout_data["returns"] = advantages

    estimator = with_advantages(EstimatorBase, fn, "mine.py:fn")(ARGS)
    with pytest.raises(PluginError, match=complaint) as error:
        estimator.advantages(ARGS, advantage_inputs([1.5, -1.0], [2, 1]))
    assert "mine.py:fn" in str(error.value)
