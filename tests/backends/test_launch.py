"""Real SGLang servers and a real router, launched and ended by the `sglang` engine."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from slime_engine_http.service import Place
from slime_engine_sglang.engine import SglangEngine
from slime_engine_sglang.programs import RouterProcess

from slime_core.errors import EngineError
from tests.backends.conftest import Running
from tests.backends.whole_runs import command_line, still_running

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]

PROMPT = [40, 41, 42, 43]


def below(keepers: Iterable[int | None]) -> list[psutil.Process]:
    """The keepers and everything under them."""
    found: list[psutil.Process] = []
    for pid in keepers:
        keeper = psutil.Process(pid)
        found += [keeper, *keeper.children(recursive=True)]
    return found


async def test_start_generate_through_the_router_stop(
    sglang_model: tuple[Path, Any], sglang_args: Callable[..., Any], tmp_path: Path
) -> None:
    directory, model = sglang_model
    args = sglang_args(directory, tmp_path)
    engine = SglangEngine(args)
    processes: list[psutil.Process] = []
    try:
        await engine.start()
        assert engine.fleet is not None
        (launched,) = engine.fleet.models
        assert launched.router is not None
        assert (args.sglang_router_ip, args.sglang_router_port) == ("127.0.0.1", launched.router.port)
        assert args.sglang_model_routers == {"default": ("127.0.0.1", launched.router.port)}
        assert await engine.address() == ("127.0.0.1", launched.router.port)
        assert engine.router is not None
        assert await engine.router.list_workers() == [launched.servers[0].url]
        processes = below([launched.router.pid, *(server.pid for server in launched.servers)])
        assert len(processes) >= 2 * 3 + 2, "two keepers and a program each, and SGLang's own processes"

        output = await engine.generate(PROMPT, {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True})
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + output.token_ids])).logits[0, len(PROMPT) - 1 : -1]
        assert output.token_ids == logits.argmax(-1).tolist()
        wanted = torch.log_softmax(logits, -1)[range(8), output.token_ids]
        torch.testing.assert_close(torch.tensor(output.log_probs), wanted, atol=1e-4, rtol=0)
    finally:
        began = time.monotonic()
        await engine.stop()
    assert time.monotonic() - began < 40
    assert processes
    assert still_running(processes, 0) == []
    await engine.stop()


async def test_a_bad_flag_value_is_reported_with_the_end_of_the_log(
    sglang_model: tuple[Path, Any], sglang_args: Callable[..., Any], tmp_path: Path
) -> None:
    args = sglang_args(sglang_model[0], tmp_path, sglang_attention_backend="torch_native", sglang_page_size=-3)
    engine, others = SglangEngine(args), set(psutil.Process().children(recursive=True))  # those of other tests
    with pytest.raises(EngineError) as caught:
        await engine.start()
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("SGLang server default/0 did not come up: after ")
    assert "Error" in first
    assert f"  last lines of {tmp_path / 'engines/default/0.log'}:" in rest
    assert engine.fleet is None
    children = set(psutil.Process().children(recursive=True)) - others
    assert [p for p in still_running(children, 0) if "guard.py" in command_line(p)] == []


async def test_no_gpus_are_a_router_only(
    sglang_model: tuple[Path, Any], sglang_args: Callable[..., Any], tmp_path: Path
) -> None:
    args = sglang_args(sglang_model[0], tmp_path, rollout_num_gpus=0)
    engine = SglangEngine(args)
    try:
        await engine.start()
        assert engine.fleet is not None
        assert engine.fleet.models[0].router is not None
        assert await engine.address() == ("127.0.0.1", engine.fleet.models[0].router.port)
        assert engine.pool.workers == []
    finally:
        await engine.stop()


async def test_servers_join_a_router_that_is_running_and_leave_it(
    sglang_pair: Running, sglang_python: Path, sglang_args: Callable[..., Any], tmp_path: Path
) -> None:
    """Its own servers are the two of the pair, as servers that run already: only what the engine does to it is new."""
    router = RouterProcess("other", {"policy": "round_robin"}, Place(sglang_python, tmp_path, 60.0), device="cpu")
    await router.launch()
    args = sglang_args(sglang_pair.model, tmp_path, rollout_num_gpus=0)
    args.rollout_external_engine_addrs = sglang_pair.urls
    args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", router.port
    engine = SglangEngine(args)
    try:
        await engine.start()
        assert engine.fleet is not None
        assert engine.fleet.models[0].router is None
        assert engine.router is not None
        assert sorted(await engine.router.list_workers() or []) == sorted(sglang_pair.urls)
        output = await engine.generate(PROMPT, {"max_new_tokens": 2})
        assert len(output.token_ids) == 2
        await engine.stop()
        with urllib.request.urlopen(f"{router.url}/workers", timeout=60) as answer:
            assert json.load(answer)["workers"] == []
    finally:
        await engine.stop()
        router.close()


def test_its_processes_are_forks_of_the_first(sglang_server: Running) -> None:
    """Spawned ones would import everything again, and have a process of `multiprocessing` beside them."""
    (server,) = sglang_server.servers
    below = [command_line(process) for process in psutil.Process(server.pid).children(recursive=True)]
    assert {"sglang::scheduler", "sglang::detokenizer"} <= {line.strip() for line in below}
    assert [line for line in below if "multiprocessing" in line] == []
