"""Which servers of the engine `sglang` are asked to give their memory up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from slime_engine_http.api.transport import Answer
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_sglang.engine import SglangEngine

from slime_core.config import Args


@pytest.mark.parametrize("saver", [True, False])
async def test_servers_of_our_own_that_have_the_memory_saver(monkeypatch: pytest.MonkeyPatch, saver: bool) -> None:
    """Without it SGLang would take back what it never gave, and end."""
    engine = SglangEngine(Args(update_weight_transport="auto"))
    ours = Worker("http://a:1", state=WorkerState.READY, owned=True)
    theirs = Worker("http://b:1", state=WorkerState.READY)
    engine.pool = WorkerPool([ours, theirs])
    engine._client = SimpleNamespace(resumed=lambda: None)  # type: ignore[assignment]
    sent: list[tuple[str, str, Any]] = []

    async def send(method: str, url: str, path: str, body: Any = None, **keywords: Any) -> Any:
        if body is not None and "memory" in path:
            sent.append((url, path, body))
        body = b'{"enable_memory_saver": %s}' % (b"true" if saver else b"false")
        return Answer(url + path, 200, body, {"Content-Type": "application/json"})

    async def flush() -> None:
        """Idle."""

    monkeypatch.setattr(engine.http, "send", send)
    monkeypatch.setattr(engine, "flush_cache", flush)
    await engine.resume_memory()
    assert sent == [], "nobody has released any"
    await engine.release_memory()
    paused = [engine.pool.paused]
    for tags in (["weights"], ["kv_cache"]):
        await engine.resume_memory(tags)
        paused.append(engine.pool.paused)
    assert paused == [True, True, False]
    expected = [
        (ours.url, "/release_memory_occupation", {}),
        (ours.url, "/resume_memory_occupation", {"tags": ["weights"]}),
        (ours.url, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}),
    ]
    assert sent == (expected if saver else [])
