"""A real vLLM server for the tests, one start for the whole session.

It serves the tiny model of the engine contract. A test may change its weights, and puts the model's own back before it
ends.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from slime_engine_http.service import Place
from slime_engine_vllm.engine import VllmEngine
from slime_engine_vllm.environment import VLLM
from slime_engine_vllm.launch import VllmServer, make_plan
from slime_testing_contracts import engine_reference as reference
from slime_testing_contracts.tiny import tiny_model

from slime_core.config import Args, load_settings
from slime_core.errors import ConfigError

FAULT = """
from pathlib import Path

from vllm.model_executor.model_loader.reload import layerwise

FILE = Path({file!r})
whole = layerwise.materialize_layer


def materialize_layer(layer, info):
    if FILE.exists():
        left = int(FILE.read_text()) - 1
        FILE.write_text(str(left))
        if not left:
            FILE.unlink()
            raise MemoryError("planted by a test")
    return whole(layer, info)


def register():
    layerwise.materialize_layer = materialize_layer
"""
"""A plugin of vLLM."""
Started = Callable[..., Any]
"""(**flags) -> an engine on the shared server, as an async context manager."""


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of vLLM's environment; `make test-backends` names it."""
    named = os.environ.get("VLLM_TEST_PYTHON")
    if not named:
        pytest.skip("needs vLLM: `make test-backends PART=vllm`, or VLLM_TEST_PYTHON=/path/to/venv/bin/python")
    try:
        return VLLM.engine_python(Args(engine_python=named))
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def vllm_args(vllm_python: Path) -> Callable[..., Args]:
    """(directory of the run, **flags) -> the settings of a run with vLLM on CPU."""

    def make(run_dir: Path, **flags: Any) -> Args:
        given = {
            "hf_checkpoint": tiny_model(),
            "rollout_engine": "vllm",
            "device": "cpu",
            "engine_python": vllm_python,
            "engine_start_timeout": 900,
            "save": run_dir,
            **flags,
        }
        argv: list[str] = []
        for name, value in given.items():
            words = value if isinstance(value, list) else [] if value is True else [value]
            argv += [f"--{name.replace('_', '-')}", *map(str, words)]
        settings = load_settings(argv, command="serve", env={})
        assert VllmEngine.check_settings(settings) == []
        settings.args.run_dir = str(run_dir)
        return settings.args

    return make


@pytest.fixture(scope="session")
def out_of_memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File that makes the server run out of memory: it has the number of the layer of an update at which it does."""
    return Path(os.environ.get("VLLM_TEST_FAULT") or tmp_path_factory.mktemp("fault") / "layer")


@pytest.fixture(scope="session")
def vllm_server(
    vllm_args: Callable[..., Args], vllm_python: Path, out_of_memory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of the server."""
    if running := os.environ.get("VLLM_TEST_SERVER"):  # one that serves the contract's model, with the plugin of FAULT
        yield running
        return
    args = vllm_args(tmp_path_factory.mktemp("server"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(write_fault(tmp_path_factory.mktemp("plugin"), out_of_memory)))
        (plan,) = make_plan(args).servers
    place = Place(vllm_python, Path(args.run_dir or "") / "engines", args.engine_start_timeout)
    server = VllmServer(plan, str(tiny_model()), place)
    try:
        asyncio.run(server.launch())
        yield server.url
    finally:
        server.close()


@pytest.fixture
def started(vllm_args: Callable[..., Args], vllm_server: str, tmp_path: Path) -> Started:
    """Starts an engine on the shared server, which with `twice` counts as two servers."""

    @asynccontextmanager
    async def start(*, twice: bool = False, **flags: Any) -> AsyncIterator[VllmEngine]:
        addresses = [vllm_server, vllm_server.replace("127.0.0.1", "localhost")][: 1 + twice]
        engine = VllmEngine(vllm_args(tmp_path, rollout_external_engine_addrs=addresses, **flags))
        await engine.start()
        try:
            yield engine
        finally:
            await engine.stop()

    return start


@pytest.fixture
def lent_server(vllm_server: str, started: Started) -> Iterator[str]:
    """The URL of the shared server, for a run; it serves the model's own weights again afterwards."""

    async def give_back() -> None:
        async with started() as engine:
            await engine.update_weights_from_tensor(reference.weights().items(), 99)

    yield vllm_server
    asyncio.run(give_back())


def write_fault(folder: Path, file: Path) -> Path:
    """Write the plugin of FAULT, which reads `file`; return the folder to import it from."""
    (folder / "planted_fault.py").write_text(FAULT.format(file=str(file)))
    distribution = folder / "planted_fault-1.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-fault\nVersion: 1\n")
    (distribution / "entry_points.txt").write_text("[vllm.general_plugins]\nfault = planted_fault:register\n")
    return folder
