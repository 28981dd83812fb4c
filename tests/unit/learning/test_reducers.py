from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from slime_estimators.dr_grpo import constant

from slime_core.config import Args
from slime_core.errors import ConfigError, PluginError
from slime_core.learning.loss import reduced

torch.set_num_threads(1)

ARGS = Args(calculate_per_token_loss=False, rollout_max_response_len=10, custom_pg_loss_reducer_function_path="mine")
LOSS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
MASK = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])


def test_the_constant_reducer_divides_every_response_alike() -> None:
    masks = list(MASK.split([3, 2]))
    assert constant([9, 9], [3, 2], masks, False, ARGS)(LOSS).item() == pytest.approx(12 / 10)
    assert constant([9, 9], [3, 2], masks, True, ARGS)(LOSS).item() == pytest.approx(12.0)
    with pytest.raises(ConfigError, match="divides by --rollout-max-response-len N, which is not set"):
        constant([9], [3], masks[:1], False, Args(rollout_max_response_len=None))


def test_a_reducer_gets_thudm_slimes_arguments_and_no_masked_garbage() -> None:
    seen: dict[str, Any] = {}

    def make(
        total_lengths: Sequence[int], response_lengths: Sequence[int], loss_masks: list[torch.Tensor], per_token: bool
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        seen.update(total=total_lengths, response=response_lengths, masks=loss_masks, per_token=per_token)
        return lambda values: values.sum()

    loss = LOSS.clone()
    loss[2] = torch.nan
    assert reduced(make, ARGS, loss, MASK, [5, 6], [3, 2]).item() == 12.0
    assert (seen["total"], seen["response"], seen["per_token"]) == ([5, 6], [3, 2], False)
    assert [m.tolist() for m in seen["masks"]] == [[1.0, 1.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize(("answer", "found"), [(LOSS, r"shape \(5,\)"), (1.5, "float")])
def test_a_reducer_must_reduce(answer: Any, found: str) -> None:
    with pytest.raises(PluginError, match=f"path 'mine': the reducer must return a scalar tensor; found {found}"):
        reduced(lambda *_: lambda values: answer, ARGS, LOSS, MASK, [5, 6], [3, 2])
