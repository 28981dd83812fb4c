from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_rewards.length_penalty import LengthPenalty

from slime_core import Sample
from slime_core.config import Args
from slime_core.errors import ConfigError


def made(limit: int | None = None, **options: Any) -> LengthPenalty:
    return LengthPenalty(Args(rollout_max_response_len=limit, plugins={"length_penalty": options}))


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0), (10**9, -1.0)],
)
def test_dapo_with_the_numbers_of_its_paper(length: int, expected: float) -> None:
    reward = made(max_length=20480, buffer=4096)
    assert reward(None, Sample(tokens=[0], response_length=length)) == pytest.approx(expected)


def test_the_limit_of_the_run_is_the_default_and_an_option_wins() -> None:
    assert made(limit=100).penalty(90) == pytest.approx(-0.5)
    assert made(limit=100, max_length=1000).penalty(100) == 0.0
    assert made(limit=3).penalty(3) == -1.0


@pytest.mark.parametrize("length", range(0, 30, 3))
def test_distances(length: int) -> None:
    share = min(1.0, abs(length - 12) / 8)
    linear, cosine = (made(shape=s, target=12, window=8, factor=0.5) for s in ("linear", "cosine"))
    sample = Sample(tokens=[0], response_length=length)
    assert linear(None, sample) == pytest.approx(-0.5 * share)
    assert cosine(None, sample) == pytest.approx(-0.5 * math.sin(math.pi * share / 2) ** 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"^plugins\.length_penalty\.max_length: must be given"),
        ({"shape": "linear"}, r"plugins\.length_penalty\.target: must be given"),
        ({"max_length": 4, "buffer": 5}, "must not exceed"),
        ({"shape": "square"}, r"plugins\.length_penalty\.shape"),
        ({"factor": -1}, r"plugins\.length_penalty\.factor"),
    ],
)
def test_wrong_options_stop_the_run_before_it_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**options)


@given(st.integers(0, 10**6), st.integers(1, 10**5), st.sampled_from(["overlong", "linear", "cosine"]))
def test_always_between_minus_one_and_zero(length: int, size: int, shape: str) -> None:
    assert -1.0 <= made(shape=shape, max_length=size, target=size).penalty(length) <= 0.0
