"""Off-policy corrections through the learner: which passes they cost, and that no split changes them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from slime_corrections.mis import MismatchImportanceSampling
from slime_corrections.truncated import IcePop, TruncatedImportanceSampling

from slime_core.learning.corrector import Corrector
from slime_core.learning.loss import PolicyLoss
from slime_core.sample import TrainBatch
from tests.toy_trainer import ToyTrainer, learn, make_args, make_batch

torch.set_num_threads(1)


def correct(args: Any, batch: TrainBatch, world_size: int = 1, corrector: Any = None) -> Any:
    return learn(args, batch, world_size, loss=lambda args, made: PolicyLoss(args, made, corrector and corrector(args)))


def noisy_batch() -> TrainBatch:
    """A batch whose engine was off by noise, and whose tokens are up to three versions old."""
    batch = make_batch()
    generator = torch.Generator().manual_seed(5)
    assert batch.rollout_log_probs is not None
    batch.rollout_log_probs = [
        [p + 0.3 * float(torch.randn((), generator=generator)) for p in row] for row in batch.rollout_log_probs
    ]
    batch.weight_version = 5
    lengths = enumerate(batch.response_lengths)
    batch.token_weight_versions = [[5 - (i + t) % 4 for t in range(n)] for i, n in lengths]
    return batch


MIS = {
    "custom_tis_function_path": "mis",
    "tis_clip": 1.2,
    "tis_level": "sequence",
    "tis_mode": "clip",
    "tis_lower_bound": None,
    "tis_upper_bound": None,
    "tis_batch_normalize": True,
    "use_rs": True,
    "rs_level": "geometric",
    "rs_lower_bound": 0.9,
    "rs_upper_bound": 1.2,
    "rs_veto_threshold": 0.5,
    "rs_trust_region": "avg",
    "rs_tr_threshold": 0.2,
    "use_opsm": True,
    "opsm_delta": 0.01,
}


def mis(args: Any) -> Corrector:
    return Corrector(args, MismatchImportanceSampling(args))


@pytest.mark.parametrize(("per_token", "policy"), [(False, "recompute"), (True, "interpolate")])
@pytest.mark.parametrize(("world_size", "changes"), [(1, {"micro_batch_size": 1}), (4, {"micro_batch_size": 1})])
def test_no_split_over_micro_batches_or_ranks_changes_a_correction(
    world_size: int, changes: dict[str, Any], per_token: bool, policy: str
) -> None:
    common = {"global_batch_size": 4, "calculate_per_token_loss": per_token, **MIS, "proximal_policy": policy}
    common["tis_batch_normalize"] = policy == "recompute"
    batch = noisy_batch()
    whole, expected = correct(make_args(micro_batch_size=8, **common), batch, corrector=mis)
    found, trainer = correct(make_args(**{**common, **changes}), batch, world_size, corrector=mis)
    assert found == pytest.approx(whole, rel=1e-5, abs=1e-6)
    assert 0 < found["train/mis_rejected_fraction"] < 1
    assert expected.calls.count("log_probs actor 8") == int(policy == "recompute")
    torch.testing.assert_close(trainer.weight, expected.weight, rtol=1e-6, atol=1e-7)


def test_a_correction_takes_recomputed_log_probs_in_the_first_step_too() -> None:
    """One step over exactly known mismatches: weights exp(shift), capped; a blend needs no pass at all."""
    args = make_args(tis_clip=1.1, tis_clip_low=0.0)

    def tis(args: Any) -> Corrector:
        return Corrector(args, TruncatedImportanceSampling(args))

    metrics, trainer = correct(args, make_batch(shift=-0.05), corrector=tis)
    assert trainer.calls == ["log_probs actor 8", "train_step"]
    assert metrics["train/tis"] == pytest.approx(math.exp(0.05), rel=1e-5)
    plain, _ = correct(make_args(), make_batch())
    assert metrics["train/pg_loss"] == pytest.approx(plain["train/pg_loss"] * math.exp(0.05), rel=1e-5)
    args.proximal_policy = "interpolate"
    args.global_batch_size = 4
    metrics, trainer = correct(args, noisy_batch(), corrector=tis)
    assert trainer.calls == ["train_step", "train_step"]
    assert metrics["train/ppo_kl"] != 0.0


@pytest.mark.parametrize("correction", ["mis", "icepop"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_advantages_are_normalised_over_what_is_kept(correction: str, world_size: int) -> None:
    """The gradient written by hand, in float64 and over both steps, with rewards of rejected rows that are far off."""
    common = {
        **MIS, "use_opsm": False, "tis_mode": "truncate", "tis_batch_normalize": False, "rs_veto_threshold": None,
        "rs_trust_region": None, "rs_level": "sequence", "normalize_advantages": True, "tis_clip_low": 0.5,
        "tis_level": "token", "tis_clip": 2.0,
    }  # fmt: skip
    args, batch = make_args(**common), make_batch()
    assert batch.rollout_log_probs is not None
    rejected = [1, 4, 6]
    for i in rejected:
        batch.rollout_log_probs[i] = [p - 5.0 for p in batch.rollout_log_probs[i]]
        batch.rewards[i] += 300.0
    made: dict[str, Any] = {"mis": MismatchImportanceSampling, "icepop": IcePop}
    _, trainer = correct(args, batch, world_size, lambda args: Corrector(args, made[correction](args)))
    kept = [i for i in range(8) if i not in rejected]
    rows = torch.tensor([batch.rewards[i] for i in kept for m in batch.loss_masks[i] if m], dtype=torch.float64)
    fresh, loss = ToyTrainer(), torch.zeros((), dtype=torch.float64)
    for i in kept:
        mask = torch.tensor(batch.loss_masks[i], dtype=torch.float64)
        advantage = (batch.rewards[i] - rows.mean()) / (rows.var() + 1e-8).sqrt()
        log_probs = fresh.output(fresh.weight, batch, [i]).log_probs
        loss = loss - (log_probs * mask).sum() * advantage / mask.sum() / 8
    (gradient,) = torch.autograd.grad(loss, fresh.weight)
    torch.testing.assert_close(trainer.weight.detach(), (fresh.weight - gradient).detach(), rtol=1e-5, atol=1e-6)


def test_a_rollout_of_which_nothing_is_kept_trains_nothing() -> None:
    """Rejected as a whole it is no error, as it is none without `--normalize-advantages`."""
    args = make_args(**{**MIS, "tis_batch_normalize": False, "use_opsm": False, "normalize_advantages": True})
    metrics, trainer = correct(args, make_batch(shift=-5.0), corrector=mis)
    assert metrics["train/mis_rejected_fraction"] == 1.0
    assert torch.equal(trainer.weight, ToyTrainer().weight)
