"""A user's loss on logits: the dictionary it gets, the mean it is given, and that a split changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from slime_commands.custom_loss import CustomLoss

from slime_core.errors import PluginError
from slime_core.ops import clipped_surrogate, response_log_probs
from tests.toy_trainer import VOCAB, learn, make_batch
from tests.toy_trainer import make_args as toy_args

torch.set_num_threads(1)


def make_args(**changes: Any) -> Any:
    return toy_args(custom_loss_function_path="mine", rollout_temperature=1.0, **changes)


def ppo(args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    """PPO's loss, entropy and KL, written as a user of THUDM/slime would."""
    log_probs, entropy = response_log_probs(
        logits, batch["unconcat_tokens"], batch["response_lengths"], args.rollout_temperature, with_entropy=True
    )
    assert entropy is not None
    ppo_kl = torch.cat(batch["log_probs"]) - torch.cat(log_probs)
    loss, clipfrac = clipped_surrogate(ppo_kl, torch.cat(batch["advantages"]), args.eps_clip, args.eps_clip_high)
    pg_loss, mean_entropy = sum_of_sample_mean(loss), sum_of_sample_mean(torch.cat(entropy))
    total = pg_loss - args.entropy_coef * mean_entropy
    metrics = {"pg_loss": pg_loss, "entropy_loss": mean_entropy, "pg_clipfrac": sum_of_sample_mean(clipfrac)}
    return total, {**metrics, "ppo_kl": sum_of_sample_mean(ppo_kl)}


def custom(function: Any) -> Callable[[Any, Any], CustomLoss]:
    return lambda args, estimator: CustomLoss(args, estimator, function)


@pytest.mark.parametrize(("per_token", "siblings"), [(False, True), (True, False)])
@pytest.mark.parametrize("micro_batch_size", [1, 8])
def test_ppo_by_hand_is_the_built_in(micro_batch_size: int, siblings: bool, per_token: bool) -> None:
    common = {"calculate_per_token_loss": per_token, "global_batch_size": 2 if siblings else 4, "entropy_coef": 0.05}
    batch = make_batch(siblings=siblings)
    expected, plain = learn(make_args(micro_batch_size=8, **common), batch)
    found, trainer = learn(make_args(micro_batch_size=micro_batch_size, **common), batch, loss=custom(ppo))
    for name in (name for name in found if name.startswith("train/")):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    torch.testing.assert_close(trainer.weight, plain.weight, rtol=1e-6, atol=1e-7)


def test_the_batch_is_thudm_slimes() -> None:
    batches: list[dict[str, Any]] = []

    def spy(args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
        batches.append(batch)
        assert logits.shape == (1, sum(batch["total_lengths"]), VOCAB)
        assert logits.requires_grad
        return logits.sum() * 0.0, {}

    whole = make_batch(shift=0.1)
    learn(make_args(use_kl_loss=True, global_batch_size=4), whole, loss=custom(spy))
    assert len(batches) == 4
    assert [len(b["unconcat_tokens"]) for b in batches] == [2] * 4
    rows = [row.tolist() for b in batches for row in b["unconcat_tokens"]]
    assert rows == whole.tokens
    for b in batches:
        assert b["tokens"].tolist() == [[t for row in b["unconcat_tokens"] for t in row.tolist()]]
        assert b["total_lengths"] == [len(row) for row in b["unconcat_tokens"]]
        for key in ("loss_masks", "advantages", "returns", "log_probs", "rollout_log_probs", "ref_log_probs"):
            assert [len(part) for part in b[key]] == b["response_lengths"], key
            assert not any(part.requires_grad for part in b[key])
        assert len(b["rewards"]) == len(b["raw_reward"]) == 2


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(()), "returned Tensor; expected"),
        ((torch.zeros(2), {}), r"loss of shape \(2,\)"),
        ((0.5, {}), "loss of shape float"),
        ((torch.zeros(()), {"x": torch.zeros(3)}), "no scalars: x"),
    ],
)
def test_what_it_may_not_return(result: Any, message: str) -> None:
    with pytest.raises(PluginError, match=f"--custom-loss-function-path 'mine'.*{message}"):
        learn(make_args(), make_batch(), loss=custom(lambda *args: result))
    with pytest.raises(PluginError, match="one value per response token"):
        learn(make_args(), make_batch(), loss=custom(lambda a, b, logits, mean: (mean(logits[0, :, 0]), {})))
