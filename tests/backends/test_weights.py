"""Updates of real SGLang servers that go wrong, and adapters: log-probs are those of transformers.

`test_engine_conformance.py` has updates that go well.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from slime_engine_http.api.transport import Http
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_http.weights.update import WeightUpdates
from slime_engine_sglang.engine import SglangEngine
from slime_engine_sglang.programs import ServerProcess
from slime_testing_contracts.tiny import tiny_model

from slime_core.config import Args
from slime_core.errors import EngineError, WeightSyncError
from slime_core.models.hf_io import copy_assets, write_weights
from tests.backends.conftest import Running
from tests.backends.vllm.test_lora import adapters, gap

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]

PROMPT = list(range(20, 44))
TRANSPORTS = ("tensor", "distributed", "disk")
PARAMS = {"max_new_tokens": 16, "temperature": 1.0, "ignore_eos": True}
TIMEOUT_S = 20.0
FREEZE_S = 12.0
"""A step's time where one server is frozen; the other has to take every step within it."""


def other(model: Any, seed: int) -> Any:
    """A model of the same shape with other weights."""
    generator, new = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return new


def named(model: Any) -> list[tuple[str, torch.Tensor]]:
    tied = model.config.tie_word_embeddings
    return [(n, p.detach()) for n, p in model.named_parameters() if not (tied and n == "lm_head.weight")]


def log_probs(model: Any, ids: list[int]) -> torch.Tensor:
    """Of the tokens after the prompt, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + ids])).logits[0].float()
    first = len(PROMPT)
    return logits.log_softmax(-1)[torch.arange(first - 1, first - 1 + len(ids)), torch.tensor(ids)]


class Session:
    """An update's parts, and what the servers answer."""

    def __init__(self, http: Http, urls: list[str], model: Path, folder: Path, **args: Any) -> None:
        given = {"update_weight_buffer_size": 20_000, "update_weight_timeout": TIMEOUT_S} | args
        self.http, self.model, self.folder = http, model, folder
        self.workers = [Worker(url, owned=True, state=WorkerState.READY) for url in urls]
        self.pool = WorkerPool(self.workers)
        self.updates = WeightUpdates(http, self.pool, Args(**given))

    async def push(
        self, transport: str, model: Any, version: int, at: Callable[[], None] | None = None
    ) -> dict[str, float]:
        """`at` is called in the middle."""
        weights = named(model)

        def drawn() -> Iterator[tuple[str, torch.Tensor]]:
            for number, entry in enumerate(weights):
                if at is not None and number == len(weights) // 2:
                    at()
                yield entry

        if transport == "tensor":
            return await self.updates.from_tensors(drawn(), version)
        if transport == "distributed":
            return await self.updates.from_broadcast(drawn(), version)
        directory = self.folder / f"v{version}"
        directory.mkdir()
        copy_assets(self.model, directory)
        write_weights(directory, weights)
        if at is not None:
            at()
        return await self.updates.from_directory(directory, version)

    async def gap(self, url: str, model: Any) -> tuple[float, str]:
        """Largest difference of log-probs between the server and `model`, and the version of the tokens."""
        body = {"input_ids": PROMPT, "sampling_params": PARAMS, "return_logprob": True}
        meta = (await self.http.send("POST", url, "/generate", body, timeout=TIMEOUT_S)).json()["meta_info"]
        served, ids = zip(*((entry[0], entry[1]) for entry in meta["output_token_logprobs"]))
        return (log_probs(model, list(ids)) - torch.tensor(served)).abs().max().item(), meta["weight_version"]


def run(urls: list[str], model: Path, folder: Path, use: Callable[[Session], Any], **args: Any) -> None:
    async def whole() -> None:
        http = Http()
        await http.open()
        session = Session(http, urls, model, folder, **args)
        try:
            await use(session)
        finally:
            session.updates.close()
            await http.close()

    asyncio.run(whole())


def processes(server: ServerProcess) -> list[int]:
    """The server's processes, not its keeper's."""
    assert server.pid is not None
    return [process.pid for process in psutil.Process(server.pid).children(recursive=True)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_that_hangs_in_the_middle_is_left_behind_and_may_come_back(
    sglang_pair: Running, sglang_model: tuple[Path, Any], tmp_path: Path, transport: str
) -> None:
    path, model = sglang_model
    new = other(model, 3)
    struck = processes(sglang_pair.servers[0])

    async def use(s: Session) -> None:
        await s.push(transport, model, 1)
        await left_behind(s, transport, new, struck, signal.SIGSTOP)
        strike(struck, signal.SIGCONT)
        bad = s.workers[0]
        assert s.updates.last is not None
        await s.updates.catch_up(bad)
        assert await s.gap(bad.url, new) == (pytest.approx(0, abs=1e-5), "2")
        s.pool.set_state(bad, WorkerState.READY)
        await s.push(transport, model, 3)
        for worker in s.workers:
            assert await s.gap(worker.url, model) == (pytest.approx(0, abs=1e-5), "3")

    try:
        run(sglang_pair.urls, path, tmp_path, use, use_fault_tolerance=True, update_weight_timeout=FREEZE_S)
    finally:
        strike(struck, signal.SIGCONT)


def test_a_wrong_shape_is_refused_and_the_server_does_not_serve(
    sglang_pair: Running, sglang_model: tuple[Path, Any], tmp_path: Path
) -> None:
    path, model = sglang_model
    wrong = copy.deepcopy(model)
    wrong.model.norm.weight = torch.nn.Parameter(torch.ones(7))

    async def use(s: Session) -> None:
        worker = s.workers[0]
        with pytest.raises(WeightSyncError, match="weight version 1 by distributed, "):
            await s.push("distributed", wrong, 1)
        assert worker.state is WorkerState.QUARANTINED
        assert s.pool.version_wanted is None
        s.pool.set_state(worker, WorkerState.READY)
        await s.push("distributed", model, 2)
        assert await s.gap(worker.url, model) == (pytest.approx(0, abs=1e-5), "2")

    run(sglang_pair.urls[:1], path, tmp_path, use, update_weight_timeout=FREEZE_S)


def strike(struck: list[int], blow: signal.Signals) -> None:
    for pid in struck:
        with contextlib.suppress(ProcessLookupError):  # the end of the first ends the others
            os.kill(pid, blow)


async def left_behind(s: Session, transport: str, new: Any, struck: list[int], blow: signal.Signals) -> None:
    """Strike the first server in the middle of an update to version 2: the other one serves it."""
    began = time.monotonic()
    await s.push(transport, new, 2, lambda: strike(struck, blow))
    assert time.monotonic() - began < 2 * TIMEOUT_S + 15
    bad, good = s.workers
    assert bad.state is WorkerState.QUARANTINED
    assert bad.reason.startswith(f"weight version 2 by {transport}, ")
    assert (good.state, good.weight_version, s.pool.version_wanted) == (WorkerState.READY, 2, 2)
    assert await s.gap(good.url, new) == (pytest.approx(0, abs=1e-5), "2")


@pytest.mark.timeout(1800)
def test_requests_choose_among_adapters(sglang_args: Callable[..., Args], tmp_path: Path) -> None:
    """Log-probs of each adapter, requests in flight, a refusal, and a killed server; the server is the run's own."""
    names = ["planner", "solver"]
    args = sglang_args(
        tiny_model(), tmp_path, no_engine_router=True, lora_rank=3, lora_unmerged=True, use_fault_tolerance=True,
        rollout_health_check_interval=1, rollout_health_check_first_wait=1, rollout_health_check_timeout=60,
    )  # fmt: skip
    args.lora_adapters = names
    prompt, params = [11, 9, 4, 12, 7], {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}

    async def update(engine: SglangEngine, version: int) -> dict[str | None, dict[str, torch.Tensor]]:
        of = {who: adapters(10 * version + i) for i, who in enumerate((None, *names))}
        sent = [(f"adapters.{who}.{n}" if who else n, t) for who, part in of.items() for n, t in part.items()]
        await engine.update_weights_from_tensor(sent, version)
        return of

    async def check(engine: SglangEngine, of: dict[str | None, dict[str, torch.Tensor]], version: int) -> None:
        asked = [None, *names] * 2
        outputs = await asyncio.gather(*(engine.generate(prompt, params, adapter=who) for who in asked))
        assert all(gap(output, of[who]) < 5e-5 for who, output in zip(asked, outputs))
        assert all(gap(output, of[who]) > 0.1 for who, output in zip([*asked[1:], None], outputs))
        assert all(set(output.meta_info["token_weight_versions"]) == {version} for output in outputs)

    async def use() -> None:
        engine = SglangEngine(args)
        await engine.start()
        try:
            assert gap(await engine.generate(prompt, params), {}) < 5e-5
            first = await update(engine, 1)
            await check(engine, first, 1)
            with pytest.raises(EngineError, match="adapter 'critic' is not served; servers have: planner solver"):
                await engine.generate(prompt, params, adapter="critic")
            task = asyncio.create_task(engine.generate(prompt, {**params, "max_new_tokens": 300}, adapter="solver"))
            while (await engine.info())["num_running"] < 1:
                await asyncio.sleep(0.01)
            second = await update(engine, 2)
            output = await task
            versions = output.meta_info["token_weight_versions"]
            assert (len(versions), versions, set(versions)) == (300, sorted(versions), {1, 2})
            cut = versions.index(2)
            assert gap(output, first["solver"], slice(0, cut)) < 5e-5
            assert gap(output, second["solver"], slice(cut, None)) < 5e-5
            await check(engine, second, 2)
            (server,) = engine.supervised[0].servers.values()
            assert server.pid is not None
            for process in psutil.Process(server.pid).children(recursive=True):
                process.kill()
            await check(engine, second, 2)
        finally:
            await engine.stop()

    asyncio.run(use())
