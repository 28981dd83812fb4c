"""Weight deltas and a real SGLang server: a puller process beside it, and log-probs of the new weights."""

from __future__ import annotations

import copy
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_engine_http.api.engine import HttpEngine
from slime_weight_transport_delta.writer import DeltaWriter

from slime_core.config import Args
from slime_core.errors import WeightSyncError
from tests.backends.conftest import Running
from tests.backends.test_weights import PROMPT, log_probs, named

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]


def moved(model: Any, share: float, seed: int) -> Any:
    """A copy in which `share` of the elements of every weight are others."""
    generator, new = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in new.parameters():
            touched = torch.rand(parameter.shape, generator=generator) < share
            parameter += touched * 0.05 * torch.randn(parameter.shape, generator=generator)
    return new


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
async def test_what_is_served_is_what_was_written(
    sglang_server: Running, sglang_model: tuple[Path, Any], puller: str, tmp_path: Path, encoding: str
) -> None:
    directory, original = sglang_model
    root = tmp_path / "weights"
    writer = DeltaWriter(root, directory, run_dir=str(tmp_path), encoding=encoding)
    addresses = [url.removeprefix("http://") for url in sglang_server.urls]
    args = {
        "rollout_external_engine_addrs": addresses, "update_weight_puller_addrs": [puller],
        "hf_checkpoint": str(directory), "rollout_timeout": 60, "update_weight_timeout": 60,
    }  # fmt: skip
    engine = HttpEngine(Args(**args))
    await engine.start()
    try:
        assert "delta" in engine.weight_transports
        model = original
        for version, make in ((1, None), (2, 0.01), (3, 0.2)):
            model = model if make is None else moved(model, make, version)
            written = writer.write(named(model), version)
            await engine.update_weights_from_delta(root, version)
            await check(engine, model, version)
            assert written.density == pytest.approx(make or 0.0, rel=0.2)
        # Damaged on its way: the server is not told, and what it served before is what it serves.
        damaged = writer.write(named(moved(model, 0.01, 9)), 4).directory / "model-00001-of-00001.safetensors"
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1
        damaged.write_bytes(data)
        with pytest.raises(WeightSyncError, match=r"model-00001-of-00001\.safetensors: corrupted"):
            await engine.update_weights_from_delta(root, 4)
    finally:
        await engine.stop()
    for url in sglang_server.urls:  # a server that was quarantined stays paused, and says that it is not healthy
        request = urllib.request.Request(
            f"{url}/continue_generation", b"{}", {"content-type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200
    again = HttpEngine(engine._args)
    await again.start()
    try:
        await check(again, model, 3)
        # Its own weights again, for the tests that come after this one.
        writer.write(named(original), 4)
        await again.update_weights_from_delta(root, 4)
        await check(again, original, 4)
    finally:
        await again.stop()


async def check(engine: HttpEngine, model: Any, version: int) -> None:
    """Sampled log-probs are the model's, and so is the version."""
    output = await engine.generate(PROMPT, {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True})
    expected = log_probs(model, list(output.token_ids))
    assert torch.allclose(torch.tensor(output.log_probs), expected, atol=2e-4)
    assert str((await engine.info())["weight_version"]) == str(version)


async def test_the_engine_that_launches_servers_starts_a_puller(
    sglang_args: Callable[..., Any], sglang_model: tuple[Path, Any], tmp_path: Path
) -> None:
    from slime_engine_sglang.engine import SglangEngine

    directory, original = sglang_model
    root = tmp_path / "run" / "weights"
    args = sglang_args(
        directory, tmp_path / "run", no_engine_router=True, update_weight_transport="delta",
        update_weight_disk_dir=root, update_weight_local_checkpoint_dir=tmp_path / "local",
    )  # fmt: skip
    writer = DeltaWriter(root, directory, run_dir=str(tmp_path / "run"))
    engine = SglangEngine(args)
    assert "delta" in engine.weight_transports
    try:
        await engine.start()
        writer.write(named(original), 1)
        await engine.update_weights_from_delta(root, 1)
        assert engine._puller is not None
        engine._puller.kill()  # the next update brings it back
        model = moved(original, 0.02, 2)
        writer.write(named(model), 2)
        await engine.update_weights_from_delta(root, 2)
        await check(engine, model, 2)
        puller = engine._puller
    finally:
        await engine.stop()
    assert not puller.alive
