"""The plugin that moves the KL coefficient; every hook plugin against the contract of hooks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_hooks.adaptive_kl import AdaptiveKL, updated
from slime_testing_contracts import suites
from slime_testing_contracts.loop import run_loop

from slime_core.config import Args
from slime_core.errors import ConfigError
from tests.run_files import timeless

globals().update(suites("slime.plugins", "slime_hooks", {}, globals()))


def make_args(target: float | None = 0.1, **changes: Any) -> Args:
    plain = {"kl_coef": 0.0, "kl_loss_coef": 0.0, "use_kl_loss": False, "max_trainer_restarts": 0, "load": None}
    return Args(
        **{**plain, "ckpt_step": None, "finetune": False, "plugins": {"adaptive_kl": {"target": target}}, **changes}
    )


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.1, 1.0), (0.11, 1.01), (0.5, 1.02), (0.09, 0.99), (0.0, 0.98), (-3.0, 0.98),
     (float("nan"), 1.0), (float("inf"), 1.02), (float("-inf"), 0.98)],
)  # fmt: skip
def test_the_rule(kl: float, expected: float) -> None:
    assert updated(2.0, kl, 0.1, 0.1) == pytest.approx(2.0 * expected)


@given(st.floats(), st.floats(min_value=1e-300, exclude_min=True, allow_infinity=False), st.floats(1e-6, 1.0))
def test_the_coefficient_is_always_a_number(kl: float, target: float, rate: float) -> None:
    assert 1.5 < updated(2.0, kl, target, rate) < 2.5


def test_it_moves_the_coefficient_that_is_used_once_a_rollout() -> None:
    controller, args = AdaptiveKL(), make_args(use_kl_loss=True, kl_loss_coef=0.5)
    controller.slime_configure(args)
    for rollout, kl in ((0, 0.05), (0, 0.05), (1, 0.2)):
        controller.slime_step_end(rollout, {"train/kl_loss": kl, "rollout/kl": 9.0})
    assert args.kl_loss_coef == pytest.approx(0.5 * 0.98 * 1.02)
    assert args.kl_coef == 0.0
    assert controller.slime_save_state() == {
        "slime-hooks/adaptive_kl": {"setting": "kl_loss_coef", "coefficient": args.kl_loss_coef}
    }
    controller.slime_step_end(2, {})  # a rollout that trains the critic alone
    controller.slime_configure(make_args(None))
    controller.slime_step_end(3, {"train/kl_loss": 9.0})
    assert args.kl_loss_coef == pytest.approx(0.5 * 0.98 * 1.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"adaptive_kl.target 0.1: there is no KL coefficient .* --kl-coef 0.01"),
        ({"kl_coef": 0.1, "max_trainer_restarts": 2}, r"--max-trainer-restarts 2: .* plugins.adaptive_kl"),
    ],
)
def test_what_it_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdaptiveKL().slime_configure(make_args(**changes))


def test_the_loop_settles_at_the_target() -> None:
    """A policy whose KL falls with the coefficient, 0.01 / coefficient with noise, ends near the target."""
    rng, controller, args = random.Random(0), AdaptiveKL(), make_args(0.1, kl_coef=0.9)
    controller.slime_configure(args)
    seen = []
    for rollout in range(400):
        seen.append(0.01 / args.kl_coef * rng.uniform(0.9, 1.1))
        controller.slime_step_end(rollout, {"rollout/kl": seen[-1]})
    assert seen[0] < 0.02
    assert sum(seen[-50:]) / 50 == pytest.approx(0.1, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"use_kl_loss": True, "kl_loss_coef": 0.1},
        {"kl_coef": 0.1, "advantage_estimator": "reinforce_plus_plus"},
    ],
    ids=["loss", "reward"],
)
def test_a_resumed_run_is_the_run(tmp_path: Path, flags: dict[str, Any]) -> None:
    flags = {**flags, "plugins": {"adaptive_kl": {"target": 1e-4}}, "lr": 1e-2, "save_interval": 1}
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = run_loop(tmp_path / "whole", 3, **flags)
    run_loop(tmp_path / "parts", 1, **flags)
    parts = run_loop(tmp_path / "parts", 3, **flags, load=tmp_path / "parts" / "run")
    assert timeless(parts.run_dir) == timeless(whole.run_dir)
    assert parts.weight_checksums == whole.weight_checksums
    assert whole.metric("rollout/kl_coefficient") == pytest.approx([0.1 * 0.98, 0.1 * 0.98 * 1.02])
