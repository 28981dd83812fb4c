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
from slime_testing_contracts.tiny import tiny_model

from slime_core.config import Args, load_settings
from slime_core.errors import ConfigError

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
def vllm_server(
    vllm_args: Callable[..., Args], vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of the server."""
    if running := os.environ.get("VLLM_TEST_SERVER"):  # one that serves the contract's model already
        yield running
        return
    args = vllm_args(tmp_path_factory.mktemp("server"))
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
