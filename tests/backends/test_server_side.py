"""What slime's plugin for SGLang changes on CPU, and its own way to start a router."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from slime_engine_http.service import Place
from slime_engine_sglang.programs import RouterProcess

from tests.backends.conftest import Running
from tests.backends.whole_runs import command_line

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]


def test_its_processes_are_forks_of_the_first(sglang_server: Running) -> None:
    """Spawned ones would import everything again, and have a process of `multiprocessing` beside them."""
    (server,) = sglang_server.servers
    below = [command_line(process) for process in psutil.Process(server.pid).children(recursive=True)]
    assert {"sglang::scheduler", "sglang::detokenizer"} <= {line.strip() for line in below}
    assert [line for line in below if "multiprocessing" in line] == []


async def test_a_killed_router_comes_back_at_its_address(sglang_python: Path, tmp_path: Path) -> None:
    router = RouterProcess("default", {"policy": "round_robin"}, Place(sglang_python, tmp_path, 60), device="cpu")
    try:
        await router.launch()
        assert "not started directly" not in router.log.read_text(), "this version needs its own, slow launcher"
        url = router.url
        (program,) = [
            p
            for p in psutil.Process(router.pid).children(recursive=True)
            if re.match(r"\S+ \S*router_main", command_line(p))
        ]
        os.kill(program.pid, signal.SIGKILL)
        await router.restart()
        assert router.url == url
    finally:
        router.close()
