"""SGLang's features that work on CPU only with slime's plugin for it."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from slime_engine_sglang.router_process import RouterProcess

from tests.backends.conftest import Running
from tests.backends.whole_runs import command_line

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]


def check(url: str, action: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/weights_checker", json.dumps({"action": action}).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        found = json.load(error)
    return found


def test_weights_are_checked_on_cpu(sglang_server: Running) -> None:
    (url,) = sglang_server.urls
    assert check(url, "snapshot")["success"]
    assert check(url, "compare")["success"]
    assert check(url, "snapshot")["success"]  # from 0.5.23 on one that was equal is forgotten
    (rank,) = check(url, "checksum")["ranks"]
    before = rank["checksums"]
    assert len(before) > 10
    assert check(url, "reset_tensors")["success"]
    try:
        # On CPU SGLang's snapshot is the live weights, which always equal themselves.
        assert not check(url, "compare")["success"]
        assert check(url, "checksum")["ranks"][0]["checksums"] != before
    finally:
        body = json.dumps({"model_path": str(sglang_server.model)}).encode()
        request = urllib.request.Request(f"{url}/update_weights_from_disk", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["success"]
    assert check(url, "compare")["success"]
    assert check(url, "checksum")["ranks"][0]["checksums"] == before


def test_its_processes_are_forks_of_the_first(sglang_server: Running) -> None:
    """Spawned ones would import everything again, and have a process of `multiprocessing` beside them."""
    (server,) = sglang_server.servers
    below = [command_line(process) for process in psutil.Process(server.pid).children(recursive=True)]
    assert {"sglang::scheduler", "sglang::detokenizer"} <= {line.strip() for line in below}
    assert [line for line in below if "multiprocessing" in line] == []


async def test_a_killed_router_comes_back_at_its_address(sglang_python: Path, tmp_path: Path) -> None:
    router = RouterProcess(
        "default", {"policy": "round_robin"}, device="cpu", python=sglang_python, log=tmp_path / "log", timeout=60
    )
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
