"""Real SGLang servers and a Ray cluster for the tests, one start for the whole session.

Servers cost 15 to 60 seconds, mostly of imports. A test may change their weights, and puts the model's own back before
it ends. Commands join the cluster by its address, as users join theirs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from slime_engine_http.api.router import Router
from slime_engine_http.api.transport import Http
from slime_engine_http.service import Place
from slime_engine_sglang.environment import engine_python
from slime_engine_sglang.fleet import Fleet
from slime_engine_sglang.planner import make_plan
from slime_engine_sglang.programs import RouterProcess, ServerProcess

from slime_core.config import Args, load_settings
from slime_core.errors import ConfigError
from tests.backends.whole_runs import Learned, demo
from tests.conftest import SLIME
from tests.run_files import metrics
from tests.tiny_models import byte_tokenizer, make_model, make_text_model, one_thread

__all__ = ["byte_tokenizer", "make_model", "make_text_model", "one_thread"]

CPUS = 4
"""Of the Ray cluster."""


@dataclass(frozen=True)
class Running:
    """Servers of one model that the tests share, and the router in front of them."""

    args: Any
    """Settings with which an `HttpEngine` finds them; do not change them."""
    model: Path
    servers: list[ServerProcess]
    router: RouterProcess | None

    @property
    def urls(self) -> list[str]:
        """Of the servers."""
        return [server.url for server in self.servers]


@pytest.fixture(scope="session")
def embedded_demo(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """The demo with the embedded trainer and engine; it makes the inputs for others, which run in the same place."""
    cwd = tmp_path_factory.mktemp("demo")
    subprocess.run(demo(cwd, "embedded"), cwd=cwd, check=True, timeout=600, capture_output=True)
    return Learned(cwd / "embedded", cwd / "embedded-samples/{rollout_id}.jsonl", metrics(cwd / "embedded"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """HOST:PORT of a Ray cluster of this machine alone."""
    import ray  # a second or two, which tests without it do not pay

    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(
        address="local",
        num_cpus=CPUS,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=256 << 20,
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """The interpreter of SGLang's environment; `make test-backends` names it."""
    if not os.environ.get("SLIME_ENGINE_PYTHON"):
        pytest.skip("needs SGLang: `make test-backends`, or SLIME_ENGINE_PYTHON=/path/to/venv/bin/python")
    try:
        return engine_python(Args())
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def sglang_model(make_text_model: Callable[..., tuple[Path, Any]]) -> tuple[Path, Any]:
    """Directory of the tiny Qwen3 that the servers load, and the HF model to compare with."""
    return make_text_model("qwen3", seed=0)


@pytest.fixture(scope="session")
def sglang_args(sglang_python: Path) -> Callable[..., Any]:
    """(model, directory of the run, **flags) -> the settings of a run with SGLang on CPU."""

    def make(model: Path, run_dir: Path, **flags: Any) -> Any:
        given = {
            "hf_checkpoint": model,
            "rollout_engine": "sglang",
            "device": "cpu",
            "rollout_num_gpus": 1,
            "engine_python": sglang_python,
            "router_health_check_interval_secs": 1,
            "save": run_dir,
            **flags,
        }
        argv: list[str] = []
        for name, value in given.items():
            argv += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        settings = load_settings(argv, command="serve", env={})
        settings.args.run_dir = str(run_dir)
        return settings.args

    return make


@pytest.fixture(scope="session")
def sglang_server(
    sglang_model: tuple[Path, Any], sglang_args: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """One server, and no router."""
    args = sglang_args(sglang_model[0], tmp_path_factory.mktemp("server"), no_engine_router=True)
    yield from _running(args, sglang_model[0])


@pytest.fixture(scope="session")
def sglang_pair(
    sglang_model: tuple[Path, Any], sglang_args: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Two servers behind a router."""
    args = sglang_args(sglang_model[0], tmp_path_factory.mktemp("pair"), rollout_num_gpus=2)
    yield from _running(args, sglang_model[0])


def _running(args: Any, model: Path) -> Iterator[Running]:
    plan = make_plan(args, device="cpu")
    fleet = Fleet(plan, Place(engine_python(args), Path(args.run_dir) / "engines", args.engine_start_timeout))
    try:
        asyncio.run(_launch(fleet))
        servers, router = fleet.models[0].servers, fleet.models[0].router
        if router is None:
            args.rollout_external_engine_addrs = [server.url for server in servers]
        else:
            args.sglang_router_ip, args.sglang_router_port = router.host, router.port
        yield Running(args, model, servers, router)
    finally:
        fleet.stop()


async def _launch(fleet: Fleet) -> None:
    await fleet.launch()
    model = fleet.models[0]
    if model.router is None:
        return
    http = Http()
    await http.open()
    try:
        router = Router(http, model.router.url)
        await asyncio.gather(*(router.add_worker(worker) for worker in model.workers()))
    finally:
        await http.close()


@pytest.fixture
def puller(sglang_server: Running, tmp_path: Path) -> Iterator[str]:
    """`slime pull-weights` beside the server; HOST:PORT."""
    command = [
        *(SLIME, "pull-weights", "--source", tmp_path / "weights", "--local-dir", tmp_path / "local", "--port", "0"),
        *("--engine-url", *sglang_server.urls),
    ]
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            yield running.stdout.readline().strip().rsplit("http://", 1)[1]
        finally:
            running.send_signal(signal.SIGTERM)
            assert running.wait(timeout=60) == 0
