"""The adaptive KL controller: its rule, what it refuses, a closed loop, and whole runs on one and two processes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from slime_hooks.adaptive_kl import AdaptiveKL, updated

from slime_core.config import Args
from slime_core.errors import ConfigError
from tests.conftest import TinyRun
from tests.run_files import metrics, timeless


def make_args(target: float | None = 0.1, **changes: Any) -> Args:
    plain = {"kl_coef": 0.0, "kl_loss_coef": 0.0, "use_kl_loss": False, "max_trainer_restarts": 0, "load": None}
    return Args(
        **{**plain, "ckpt_step": None, "finetune": False, "plugins": {"adaptive_kl": {"target": target}}, **changes}
    )


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.1, 1.0), (0.11, 1.01), (0.5, 1.02), (0.09, 0.99), (0.0, 0.98), (-3.0, 0.98)]
)
def test_the_rule(kl: float, expected: float) -> None:
    assert updated(2.0, kl, 0.1, 0.1) == pytest.approx(2.0 * expected)


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
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("flags", [{"use_kl_loss": True, "kl_loss_coef": 0.1},
                                   {"kl_coef": 0.1, "advantage_estimator": "reinforce_plus_plus"}])  # fmt: skip
def test_a_resumed_run_is_the_run(
    tiny: TinyRun, tmp_path: Path, slime: Any, processes: int, flags: dict[str, Any]
) -> None:
    flags = {**flags, "set": "plugins.adaptive_kl.target=1e-4", "actor_num_gpus_per_node": processes,
             "eval_interval": None, "eval_prompt_data": None, "lr": "1e-2"}  # fmt: skip
    slime("train", *tiny.argv(tmp_path / "whole", **flags))
    slime("train", *tiny.argv(tmp_path / "parts", **{**flags, "num_rollout": 2}))
    slime("train", *tiny.argv(tmp_path / "parts", **flags, load=tmp_path / "parts"))
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")
    coefficients = [line.get("rollout/kl_coefficient") for line in metrics(tmp_path / "whole")]
    assert coefficients[0] is None
    assert len({*coefficients}) == 4, "it moves after every rollout"
    states = [
        json.loads((tmp_path / run / "checkpoints/rollout_0000003/state.json").read_text())
        for run in ("whole", "parts")
    ]
    assert states[0]["plugin_state"]["slime-hooks/adaptive_kl"] == states[1]["plugin_state"]["slime-hooks/adaptive_kl"]
