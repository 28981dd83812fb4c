"""Adapters alone for a vLLM server of the run: every transport, requests in flight, refusals, a killed server."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_embedded.models.lora import is_projection, merged, module_of
from slime_engine_vllm.engine import VllmEngine
from slime_testing_contracts import engine_reference as reference

from slime_core.config import Args
from slime_core.errors import EngineError, WeightSyncError
from slime_core.models.hf_io import copy_assets, write_weights
from tests.backends.vllm.test_faults import processes, until_back

pytestmark = [pytest.mark.backends, pytest.mark.timeout(1800)]

PROMPT = [11, 9, 4, 12, 7]
PARAMS = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
Weights = dict[str, torch.Tensor]


def adapters(seed: int, rank: int = 3) -> Weights:
    generator, made = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, weight in reference.weights().items():
        if is_projection(name):
            rows, columns = weight.shape
            made[f"{module_of(name)}.lora_A"] = torch.randn(rank, columns, generator=generator) * 0.1
            made[f"{module_of(name)}.lora_B"] = torch.randn(rows, rank, generator=generator) * 0.1
    return made


def gap(output: Any, sent: Weights, tokens: slice = slice(None)) -> float:
    """The largest difference to transformers with the merged weights."""
    model = copy.deepcopy(reference.model())
    for name, weight in model.named_parameters():
        if (down := f"{module_of(name)}.lora_A") in sent:
            weight.data = merged(weight.data, sent[down], sent[f"{module_of(name)}.lora_B"], 1.0)
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *output.token_ids]])).logits[0, len(PROMPT) - 1 : -1].double()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    return float((expected - torch.tensor(output.log_probs)).abs()[tokens].max())


async def with_engine(args: Args, use: Callable[[VllmEngine], Awaitable[None]]) -> None:
    engine = VllmEngine(args)
    await engine.start()
    try:
        await use(engine)
    finally:
        await engine.stop()


def test_adapters_are_served(vllm_args: Callable[..., Args], tmp_path: Path) -> None:
    args = vllm_args(
        tmp_path, rollout_num_gpus=1, lora_rank=3, lora_unmerged=True, use_fault_tolerance=True,
        rollout_health_check_interval=1, rollout_health_check_first_wait=1, rollout_health_check_timeout=60,
    )  # fmt: skip

    async def use(engine: VllmEngine) -> None:
        assert gap(await engine.generate(PROMPT, PARAMS), {}) < 5e-5
        first, second = adapters(1), adapters(2)
        await engine.update_weights_from_tensor(first.items(), 1)
        output = await engine.generate(PROMPT, PARAMS)
        assert gap(output, first) < 5e-5
        assert gap(output, {}) > 0.1
        assert output.meta_info["token_weight_versions"] == [1] * 24

        # In flight: kept, and their keys and values computed again.
        task = asyncio.create_task(engine.generate(PROMPT, {**PARAMS, "max_new_tokens": 450}))
        while (await engine.info())["num_running"] < 1:
            await asyncio.sleep(0.01)
        await engine.update_weights_from_distributed(second.items(), 2)
        output = await task
        versions = output.meta_info["token_weight_versions"]
        assert (len(versions), versions, set(versions)) == (450, sorted(versions), {1, 2})
        cut = versions.index(2)
        assert gap(output, first, slice(0, cut)) < 5e-5
        assert gap(output, second, slice(cut, None)) < 5e-5

        # Refused: the adapters of before serve on.
        name = next(iter(first))
        for wrong, said in (
            ({name: torch.zeros(3, 7)}, "has shape"),
            ({name: torch.zeros(9, first[name].shape[1])}, "has rank 9; --max-lora-rank is 8"),
            ({"model.norm.lora_A": torch.zeros(3, 4)}, "vLLM has no adapters there"),
            ({"model.norm.weight": torch.ones(4)}, "not both"),
        ):
            with pytest.raises(WeightSyncError, match=said):
                await engine.update_weights_from_tensor((first | wrong).items(), 3)
            assert gap(await engine.generate(PROMPT, PARAMS), second) < 5e-5

        # From files; a server that is killed comes back with them.
        copy_assets(args.hf_checkpoint, tmp_path / "v4")
        write_weights(tmp_path / "v4", iter(first.items()), shard_bytes=20_000)
        await engine.update_weights_from_disk(tmp_path / "v4", 4)
        assert gap(await engine.generate(PROMPT, PARAMS), first) < 5e-5
        os.kill(processes(engine)[0].pid, signal.SIGKILL)
        output = await engine.generate(PROMPT, PARAMS)
        assert gap(output, first) < 5e-5
        assert set(output.meta_info["token_weight_versions"]) == {4}
        await until_back(engine, 1)

    asyncio.run(with_engine(args, use))


def test_requests_choose_among_adapters(vllm_args: Callable[..., Args], tmp_path: Path) -> None:
    names = ["planner", "solver"]
    args = vllm_args(tmp_path, rollout_num_gpus=1, lora_rank=3, lora_unmerged=True, lora_adapters=names)

    def sent(of: dict[str | None, Weights]) -> list[tuple[str, torch.Tensor]]:
        return [(f"adapters.{who}.{n}" if who else n, t) for who, part in of.items() for n, t in part.items()]

    async def use(engine: VllmEngine) -> None:
        for version in (1, 2):
            of: dict[str | None, Weights] = {who: adapters(10 * version + i) for i, who in enumerate((None, *names))}
            await engine.update_weights_from_tensor(sent(of), version)
            asked = [None, *names] * 2
            outputs = await asyncio.gather(*(engine.generate(PROMPT, PARAMS, adapter=who) for who in asked))
            assert all(gap(output, of[who]) < 5e-5 for who, output in zip(asked, outputs))
            assert gap(outputs[1], of["solver"]) > 0.1
            with pytest.raises(EngineError, match="adapter 'critic' is not served; servers have: planner solver"):
                await engine.generate(PROMPT, PARAMS, adapter="critic")

    asyncio.run(with_engine(args, use))
