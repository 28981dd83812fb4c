"""Weights that are split over ranks, by every transport to a real engine, which then answers as the trainer says.

`--check-weight-update-equal` compares every tensor served with what Megatron's ranks have together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_core.config import Args
from tests.backends.conftest import Running
from tests.backends.megatron.ranks import RankPool

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]

LAYOUTS = {"tensor": {"tensor_model_parallel_size": 2}, "pipeline": {"pipeline_model_parallel_size": 2}}
TRAINING = {
    "device": "cpu", "lr": 1e-3, "lr_decay_style": "constant", "distributed_timeout_minutes": 2, "seed": 0,
    "rollout_temperature": 1.0, "check_weight_update_equal": True, "update_weight_buffer_size": 50_000,
    "update_weight_timeout": 60, "update_weight_disk_keep_files": False,
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_to_sglang(
    ranks: Callable[[int], RankPool], sglang_server: Running, puller: str, tmp_path: Path, layout: str
) -> None:
    args = settings(copy.copy(sglang_server.args), **LAYOUTS[layout], update_weight_puller_addrs=[puller])
    check(ranks(2), args, "http", ["tensor", "distributed", "disk", "delta"], tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_to_the_embedded_engine(
    ranks: Callable[[int], RankPool], sglang_args: Callable[..., Any], make_text_model: Any, tmp_path: Path, layout: str
) -> None:
    model, _ = make_text_model("qwen3", seed=0)
    args = settings(sglang_args(model, tmp_path, rollout_engine="embedded"), **LAYOUTS[layout])
    check(ranks(2), args, "embedded", ["tensor", "disk"], tmp_path)


def settings(args: Any, **flags: Any) -> Args:
    """Those of the run, for the ranks."""
    return args.model_copy(update={**TRAINING, "train_backend": "megatron", **flags})


def check(pool: RankPool, args: Any, engine: str, transports: list[str], folder: Path) -> None:
    job = "tests.backends.megatron.sync_jobs:pushed"
    first, second = pool.run(job, deadline=240, args=args, engine=engine, transports=transports, folder=str(folder))
    assert list(first) == list(second) == transports
    steps = 0.0
    for transport in transports:
        seen, other = first[transport], second[transport]
        assert seen["gap"] < 1e-4, transport
        assert other["gap"] == seen["gap"]
        assert other["moved"] == {}
        assert min(seen["moved"].values()) > 0, "every tensor has moved"
        assert max(seen["moved"].values()) > steps
        steps = max(seen["moved"].values())
