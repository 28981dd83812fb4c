"""Corrections against plain Python loops in float64, and against the contract of their kind."""

from __future__ import annotations

import math

import pytest
import torch
from slime_corrections.weights import bounded_weights, importance_at, mean_weight, trust_region
from slime_testing_contracts import suites

from slime_core.errors import ConfigError
from tests.unit.ops.test_corrections import ENGINE, LENGTHS, MASK, MASKS, TRAIN, flat, kept, ratios

CORRECTIONS = {
    "mis": {
        "args": {
            "tis_level": "sequence",
            "tis_mode": "mask",
            "tis_batch_normalize": True,
            "use_rs": True,
            "rs_level": "geometric",
            "rs_veto_threshold": 0.1,
            "rs_trust_region": "avg",
            "rs_tr_threshold": 1.0,
        }
    },
}


globals().update(suites("corrections", "slime_corrections", CORRECTIONS, globals()))


R = flat(TRAIN) - flat(ENGINE)


def test_the_exponent_is_bounded_at_twenty_after_the_sum() -> None:
    far = torch.tensor([15.0, 15.0, -50.0, 9.0], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    limit = math.exp(20)
    assert importance_at(far, ones, [2, 1, 1], "sequence").tolist() == pytest.approx(
        [limit, limit, 1 / limit, math.exp(9)]
    )


def test_mean_weight_over_tokens_or_sequences_of_all_ranks() -> None:
    weights = importance_at(R, MASK, LENGTHS, "token")
    tokens = [math.exp(r) for row, mask in zip(ratios(), MASKS, strict=True) for r in kept(row, mask)]
    found = mean_weight(weights, MASK, LENGTHS, "token", lambda t: t)
    assert found.item() == pytest.approx(sum(tokens) / len(tokens))
    weights = importance_at(R, MASK, LENGTHS, "sequence")
    per_sequence = [math.exp(sum(kept(row, mask))) for row, mask in zip(ratios(), MASKS, strict=True) if any(mask)]
    expected = sum(per_sequence) / len(per_sequence)
    assert mean_weight(weights, MASK, LENGTHS, "sequence", lambda t: t).item() == pytest.approx(expected)
    # Two ranks with the same samples have the same mean; one with nothing adds nothing.
    assert mean_weight(weights, MASK, LENGTHS, "sequence", lambda t: t * 2).item() == pytest.approx(expected)
    assert mean_weight(weights, MASK * 0, LENGTHS, "token", lambda t: t).item() == 1.0


def test_words_that_do_not_exist() -> None:
    ones = torch.ones(1)
    with pytest.raises(ConfigError, match="level 'word': allowed: token, sequence, geometric"):
        importance_at(ones, ones, [1], "word")
    with pytest.raises(ConfigError, match="mode 'drop': allowed: truncate, clip, mask"):
        bounded_weights(ones, "drop", 0.5, 2.0)
    with pytest.raises(ConfigError, match="trust region 'min': allowed: max, avg"):
        trust_region(ones, ones, [1], "min", 0.1)
