"""Against plain Python loops in float64."""

from __future__ import annotations

import math

import pytest
import torch

from slime_core.ops import interpolated_log_probs, mismatch_metrics, off_policy_sequences

torch.set_num_threads(1)

LENGTHS = [3, 2, 1, 2]
TRAIN = [[-0.5, -1.0, -0.2], [-1.0, -2.0], [-0.3], [-4.0, -0.1]]
ENGINE = [[-0.6, -1.2, -0.1], [-1.5, -1.0], [-0.9], [-0.1, -0.2]]
MASKS = [[1, 1, 0], [1, 1], [0], [1, 1]]


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def kept(values: list[float], mask: list[int]) -> list[float]:
    return [v for v, m in zip(values, mask, strict=True) if m]


def ratios() -> list[list[float]]:
    return [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(TRAIN, ENGINE, strict=True)]


MASK = flat(MASKS)  # type: ignore[arg-type]


def test_mismatch_metrics_written_out() -> None:
    found = {name: value.tolist() for name, value in mismatch_metrics(flat(TRAIN), flat(ENGINE), MASK, LENGTHS).items()}
    at = 0
    for train, engine, row, mask in zip(TRAIN, ENGINE, ratios(), MASKS, strict=True):
        n = max(sum(mask), 1)
        log_ppl, engine_log_ppl = -sum(kept(train, mask)) / n, -sum(kept(engine, mask)) / n
        for r in row:
            expected = {
                "kl": -r,
                "k3_kl": math.exp(r) - 1 - r,
                "chi2_token": math.exp(2 * r) - 1,
                "chi2_seq": math.exp(2 * sum(kept(row, mask))) - 1,
                "training_log_ppl": log_ppl,
                "training_ppl": math.exp(log_ppl),
                "rollout_log_ppl": engine_log_ppl,
                "rollout_ppl": math.exp(engine_log_ppl),
                "log_ppl_diff": log_ppl - engine_log_ppl,
                "log_ppl_abs_diff": abs(log_ppl - engine_log_ppl),
                "ppl_ratio": math.exp(log_ppl - engine_log_ppl),
            }
            assert {name: value[at] for name, value in found.items()} == pytest.approx(expected, abs=1e-13)
            at += 1


def test_off_policy_sequence_masking() -> None:
    """GSPO's golden batch with old and new exchanged: sequence KLs (old - new, masked mean) 0.15 and -0.25."""
    new, old = torch.tensor([-0.6, -1.2, -0.1, -1.5, -1.0]), torch.tensor([-0.5, -1.0, -0.2, -1.0, -2.0])
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    advantages = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0])
    assert off_policy_sequences(new, old, advantages, mask, [3, 2], 0.1).tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert off_policy_sequences(new, old, advantages, mask, [3, 2], 0.2).tolist() == [0.0] * 5
    assert off_policy_sequences(new, old, -advantages, mask, [3, 2], 0.1).tolist() == [0.0] * 5


def test_interpolated_proximal_policy() -> None:
    current = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    engine = torch.tensor([math.nan, -3.0, -3.0, -3.0], dtype=torch.float64)
    staleness = torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=torch.float64)
    found = interpolated_log_probs(current, engine, staleness)
    assert found.tolist() == pytest.approx([-1.0, -3.0, -2.0, -1.5])
    assert not found.requires_grad
    assert interpolated_log_probs(current, engine, None).tolist() == [-1.0] * 4
