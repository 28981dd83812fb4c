"""A server of two processes, each with half of the model: it generates, and takes every transport."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_engine_sglang.engine import SglangEngine

from slime_core.models.hf_io import copy_assets, write_weights
from tests.backends.test_weights import PARAMS, PROMPT, log_probs, named, other

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]


async def gap(engine: SglangEngine, model: Any) -> float:
    """Largest difference of log-probs between what is served and `model`."""
    output = await engine.generate(PROMPT, PARAMS)
    assert len(output.token_ids) == PARAMS["max_new_tokens"]
    return (log_probs(model, list(output.token_ids)) - torch.tensor(output.log_probs)).abs().max().item()


async def test_two_processes_of_one_server_take_every_transport(
    sglang_model: tuple[Path, Any], sglang_args: Callable[..., Any], tmp_path: Path
) -> None:
    path, model = sglang_model
    new = other(model, 4)
    engine = SglangEngine(
        sglang_args(
            path, tmp_path / "run",
            rollout_num_gpus=2, rollout_num_gpus_per_engine=2, no_engine_router=True, update_weight_buffer_size=20_000,
        )
    )  # fmt: skip
    await engine.start()
    try:
        assert len(engine.pool.ready) == 1
        assert engine.weight_transports == ("tensor", "distributed", "disk")
        assert await gap(engine, model) <= 1e-5
        version = 0
        for transport in engine.weight_transports:
            for target, elsewhere in ((new, model), (model, new)):
                version += 1
                if transport == "tensor":
                    await engine.update_weights_from_tensor(named(target), version)
                elif transport == "distributed":
                    await engine.update_weights_from_distributed(named(target), version)
                else:
                    directory = tmp_path / f"v{version}"
                    copy_assets(path, directory)
                    write_weights(directory, named(target))
                    await engine.update_weights_from_disk(directory, version)
                assert await gap(engine, target) <= 1e-5, transport
                assert await gap(engine, elsewhere) > 1e-2, transport
    finally:
        await engine.stop()
