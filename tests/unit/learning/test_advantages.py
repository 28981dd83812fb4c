from __future__ import annotations

from typing import Any

import pytest
import torch

from slime_core.config import Args
from slime_core.errors import TrainError
from slime_core.estimator import EstimatorBase
from slime_core.learning.passes import compute_advantages
from slime_core.learning.tensors import TrainTensors
from slime_core.protocols import AdvantageInputs, Advantages
from slime_core.sample import TrainBatch
from tests.batches import train_batch


def make_args(**changes: Any) -> Args:
    return Args(**{"normalize_advantages": False, "kl_coef": 0.0, "kl_loss_type": "k1", "use_opd": False, **changes})


def make_batch(rewards: list[float], masks: list[list[int]]) -> TrainBatch:
    return train_batch(masks, rollout_id=4, rewards=rewards)


def compute(args: Any, batch: TrainBatch, estimator: Any = None, **columns: Any) -> TrainTensors:
    tensors = TrainTensors.from_batch(batch, torch.device("cpu"))
    for name, column in columns.items():
        setattr(tensors, name, [torch.tensor(row) for row in column])
    return compute_advantages(args, batch, tensors, estimator or EstimatorBase(args), lambda tensor: tensor)


class TakesKl(EstimatorBase):
    def advantages(self, args: Any, inputs: AdvantageInputs) -> Advantages:
        assert inputs.log_probs is not None
        assert inputs.ref_log_probs is not None
        return Advantages(advantages=inputs.kl, returns=inputs.kl)


def test_the_kl_is_between_the_old_policy_and_the_reference() -> None:
    args = make_args(kl_coef=0.1, kl_loss_type="k2")
    columns = {"old_log_probs": [[-0.5, -1.0, -2.0, -0.1]], "ref_log_probs": [[-0.7, -0.6, -2.0, -3.1]]}
    found = compute(args, make_batch([0.0], [[1, 1, 1, 1]]), TakesKl(args), **columns)
    assert found.kl is not None
    assert found.advantages is not None
    assert found.kl[0].tolist() == pytest.approx([0.02, 0.08, 0.0, 4.5])
    assert torch.equal(found.advantages[0], found.kl[0])


def test_distillation_is_taken_off_before_whitening() -> None:
    batch = make_batch([1.0, 3.0], [[1, 1], [1, 0]])
    columns = {
        "old_log_probs": [[-1.0, -2.0], [-0.5, -1.0]],
        "teacher_log_probs": [[-2.0, -1.0], [-0.25, float("nan")]],
    }
    found = compute(make_args(use_opd=True, opd_kl_coef=0.5), batch, **columns)
    assert found.advantages is not None
    assert found.returns is not None
    assert found.opd_reverse_kl is not None
    assert [part.tolist() for part in found.opd_reverse_kl] == [[1.0, -1.0], [-0.25, 0.0]]
    assert [part.tolist() for part in found.advantages] == [[0.5, 1.5], [3.125, 3.0]]
    assert [part.tolist() for part in found.returns] == [[1.0, 1.0], [3.0, 3.0]]
    white = compute(make_args(use_opd=True, opd_kl_coef=0.5, normalize_advantages=True), batch, **columns)
    assert white.advantages is not None
    values = torch.tensor([0.5, 1.5, 3.125])
    expected = (values - values.mean()) / values.std()
    torch.testing.assert_close(torch.cat(white.advantages)[:3], expected)


def test_a_wrong_shape_names_the_estimator() -> None:
    class Short(EstimatorBase):
        def advantages(self, args: Any, inputs: AdvantageInputs) -> Advantages:
            return Advantages(advantages=[torch.zeros(1)], returns=[torch.zeros(1)])

    with pytest.raises(TrainError, match=r"Short\.advantages returned advantages of shapes \[\(1,\)\]"):
        compute(make_args(), make_batch([1.0], [[1, 1]]), Short(make_args()))
