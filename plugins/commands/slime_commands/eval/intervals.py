"""Scores of prompts -> the mean with its confidence interval. numpy, no clock: a seed gives the same numbers.

Prompts are independent draws; samples of one prompt are not. So the input is one value per prompt. The interval covers
other prompts of the same kind and, since the values contain the samples, other samples. It does not cover another data
set.

The values decide the method. If every prompt scored 0 or 1 (one sample each, or k = n): Wilson's score interval, which
also holds for few prompts and for scores of 0 and 1. Else: percentile bootstrap over prompts. One prompt alone has no
interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

CONFIDENCE = 0.95
RESAMPLES = 2000
_CHUNK = 4_000_000
"""Maximum count of numbers in memory in one step of the bootstrap."""
WILSON, BOOTSTRAP, NONE = "wilson", "bootstrap over prompts", "none: one prompt"


@dataclass(frozen=True)
class Estimate:
    """A score with its confidence interval at level `CONFIDENCE`."""

    value: float
    low: float | None
    high: float | None
    method: str
    """Method of the interval: `WILSON`, `BOOTSTRAP` or `NONE`."""


def estimates(values: Mapping[str, Sequence[float]], seed: int) -> dict[str, Estimate]:
    """Return the mean of each score over the prompts, with its interval.

    Args:
        values: Score -> [prompts] values.
        seed: Seed of the bootstrap's resampling; the same prompts are drawn for every score.
    """
    return {name: estimate(list(of_prompts), seed) for name, of_prompts in values.items()}


def estimate(values: Sequence[float], seed: int) -> Estimate:
    """Return the estimate of one score; see `estimates`.

    Raises:
        statistics.StatisticsError: There are no prompts.
        ValueError: A value is not finite. Callers count failed samples as 0 (`rollout.evaluate`, `rollout.stage`).
    """
    value = fmean(values)
    if not math.isfinite(value):
        raise ValueError(f"the score of a prompt is not finite: {[v for v in values if not math.isfinite(v)][:8]}")
    if all(v in (0.0, 1.0) for v in values):
        low, high = wilson(int(sum(values)), len(values))
        return Estimate(value, low, high, WILSON)
    if len(values) == 1:
        return Estimate(value, None, None, NONE)
    low, high = bootstrap(values, seed)
    return Estimate(value, low, high, BOOTSTRAP)


def wilson(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the score interval of a rate.

    Wilson, "Probable inference, the law of succession, and statistical inference", 1927:
    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), with p the rate and z the normal quantile.

    Raises:
        ValueError: `trials` is below 1, or `successes` is not between 0 and `trials`.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} of {trials} is no rate")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate, scale = successes / trials, 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / scale
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / scale
    low = 0.0 if successes == 0 else centre - half
    return low, 1.0 if successes == trials else centre + half


def bootstrap(
    values: Sequence[float], seed: int, confidence: float = CONFIDENCE, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Return the percentile interval of the mean.

    Efron, "Bootstrap methods: another look at the jackknife", 1979.

    Args:
        values: [n] one value per prompt.
        seed: Seed of the resampling.
        confidence: Confidence level of the interval.
        resamples: Number of samples of n prompts, drawn with replacement.
    """
    import numpy as np

    data, random = np.asarray(values, dtype=np.float64), np.random.default_rng(seed)
    step = max(1, _CHUNK // len(data))
    means = [
        data[random.integers(len(data), size=(min(step, resamples - done), len(data)))].mean(axis=1)
        for done in range(0, resamples, step)
    ]
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)
