"""Learning rates against the closed forms of Megatron-LM's schedule, written out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from slime_embedded.trainer.schedule import LearningRateSchedule

from slime_core.config import Args
from slime_core.errors import ConfigError


def schedule(**flags: Any) -> LearningRateSchedule:
    return LearningRateSchedule.from_args(Args(**{"lr": 1.0, "lr_decay_iters": 100, **flags}))


def test_constant_after_warmup() -> None:
    s = schedule(lr_decay_style="constant", lr_warmup_iters=4, lr_warmup_init=0.2)
    assert [s.at(n) for n in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert s.at(10**6) == 1.0


def test_linear() -> None:
    s = schedule(lr_decay_style="linear", min_lr=0.1, lr_warmup_iters=20)
    assert s.at(0) == 0.0
    assert s.at(20) == 1.0
    assert s.at(60) == pytest.approx(0.1 + 0.9 * 0.5)
    assert s.at(100) == pytest.approx(0.1)
    assert s.at(101) == 0.1


def test_inverse_square_root() -> None:
    s = schedule(lr_decay_style="inverse-square-root", lr_warmup_iters=4, min_lr=0.05)
    assert s.at(16) == pytest.approx(0.5)
    assert s.at(100) == pytest.approx(0.2)
    assert s.at(101) == 0.05
    endless = schedule(lr_decay_style="inverse-square-root", lr_decay_iters=None, lr_warmup_iters=4, min_lr=0.05)
    assert endless.at(101) == pytest.approx(math.sqrt(4 / 101))
    assert endless.at(10**6) == 0.05
    assert endless.facts() != s.facts()


@pytest.mark.parametrize(
    ("style", "middle"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("minus_sqrt", 1 - math.sqrt(0.5)),
        ("exponential", 2 * math.sqrt(0.5) - 1),
    ],
)
def test_warmup_stable_decay(style: str, middle: float) -> None:
    s = schedule(lr_decay_style="WSD", lr_wsd_decay_style=style, lr_wsd_decay_iters=20)
    assert s.at(80) == 1.0
    assert s.at(90) == pytest.approx(middle)
    assert s.at(100) == pytest.approx(0.0)


def test_total_steps_follow_from_the_run() -> None:
    s = schedule(
        lr_decay_iters=None,
        lr_decay_style="linear",
        lr_warmup_fraction=0.1,
        num_rollout=50,
        rollout_batch_size=32,
        n_samples_per_prompt=8,
        global_batch_size=128,
    )
    assert s.decay_steps == 100
    assert s.warmup_steps == 10


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"lr_decay_style": "linear", "lr_decay_iters": None, "num_rollout": 3}, "--rollout-batch-size"),
        ({"lr_warmup_iters": 5, "lr_warmup_fraction": 0.1}, "give one of the two"),
        ({"lr_decay_style": "WSD"}, "--lr-wsd-decay-iters"),
        ({"min_lr": 2.0}, "--min-lr 2.0"),
        ({"lr_warmup_init": 2.0}, "--lr-warmup-init 2.0"),
        ({"lr_decay_style": "linear", "lr_warmup_iters": 100}, "leave nothing"),
    ],
)
def test_contradictions_name_the_flag(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        schedule(**flags)
