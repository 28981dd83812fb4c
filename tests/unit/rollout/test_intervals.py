from __future__ import annotations

import math
from statistics import NormalDist, fmean, stdev

import numpy as np
import pytest
from slime_commands.eval.intervals import BOOTSTRAP, NONE, WILSON, bootstrap, estimate, estimates, wilson


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
