"""The process that updates a host's local copy of the model from deltas and makes the host's engines load it.

`slime pull-weights` runs it; a run's SGLang client requests a version. So neither SGLang nor its router needs a patch:
an engine receives `/update_weights_from_disk` with a directory on its own disk.

    POST /pull {"version": N[, "engine_urls": [...]][, "timeout": S][, "flush_cache": false]}
        -> {success, version, bytes, seconds, rebuilt, engines: {url: {success, message}}}[, message]
    GET /health, GET /status

Applying and loading are separate steps: if an engine refuses, the local copy stays at the new version, and another
request only loads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slime_core.errors import SlimeError
from slime_weight_transport_delta.apply import Applied, apply, local_state

logger = logging.getLogger(__name__)

_LARGEST_BODY = 1024**2


class PullOrder(BaseModel):
    """The body of `POST /pull`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    version: int = Field(ge=0)
    engine_urls: list[str] | None = None
    timeout: float = Field(default=math.inf, gt=0)
    """Timeout in seconds; the puller's own timeout if that is shorter."""
    flush_cache: bool = True


class Puller:
    """Keeps one local copy of the model for the engines of one host."""

    def __init__(self, source: Path, local_dir: Path, engine_urls: Sequence[str], *, timeout: float) -> None:
        """Store the arguments; nothing is read yet.

        Args:
            source: Directory of versions, under its path on this host.
            local_dir: Directory of the local copy.
            engine_urls: Engines that load the copy; a request may name a subset. Empty: the engines of the request.
            timeout: Seconds for one pull, including apply and load, unless the request has a shorter timeout.
        """
        self._source, self._local = source, local_dir
        self._engines = [url.rstrip("/") for url in engine_urls]
        self._timeout = timeout
        self._lock = asyncio.Lock()
        self._last: dict[str, Any] | None = None

    def application(self) -> web.Application:
        """Return the web application with its routes."""
        app = web.Application(client_max_size=_LARGEST_BODY)
        app.add_routes(
            [web.post("/pull", self._pull), web.get("/health", self._health), web.get("/status", self._status)]
        )
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _status(self, request: web.Request) -> web.Response:
        state = await asyncio.to_thread(local_state, self._local)
        return web.json_response(
            {
                "source": str(self._source),
                "local_dir": str(self._local),
                "engine_urls": self._engines,
                "version": None if state is None else state.version,
                "busy": self._lock.locked(),
                "last": self._last,
            }
        )

    async def _pull(self, request: web.Request) -> web.Response:
        try:
            order = PullOrder.model_validate_json(await request.read())
            urls = self._wanted(order.engine_urls)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']} ({e['input']!r:.80})" for e in error.errors()]
            return web.json_response({"success": False, "message": "; ".join(problems)}, status=400)
        except ValueError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        timeout = min(order.timeout, self._timeout)
        self._last = await self.pull(order.version, urls, timeout, flush=order.flush_cache)
        return web.json_response(self._last, status=200 if self._last["success"] else 409)

    def _wanted(self, urls: Sequence[str] | None) -> list[str]:
        wanted = self._engines if urls is None else [url.rstrip("/") for url in urls]
        unknown = sorted(set(wanted) - set(self._engines)) if self._engines else []
        if unknown:
            raise ValueError(f"no engine of this puller: {', '.join(unknown)}; it has {', '.join(self._engines)}")
        if not wanted:
            raise ValueError("this puller was started without --engine-url, so engine_urls must name who loads")
        return wanted

    async def pull(
        self, version: int, engine_urls: Sequence[str], timeout: float, *, flush: bool = True
    ) -> dict[str, Any]:
        """Return the response to `POST /pull`; errors of versions, disk or engines are reported, not raised."""
        started = time.monotonic()
        answer: dict[str, Any] = {"success": False, "version": version, "bytes": 0, "rebuilt": False, "engines": {}}
        try:
            async with asyncio.timeout(timeout):
                async with self._lock:
                    applied = await self._apply(version)
                    answer |= {"bytes": applied.wire_bytes, "rebuilt": applied.rebuilt}
                    answer["engines"] = await self._load(version, engine_urls, started + timeout, flush)
        except SlimeError as error:
            answer["message"] = str(error)
        except TimeoutError:
            answer["message"] = f"weight version {version} was not applied and loaded within {timeout:g} s"
        refused = [f"{url}: {r['message']}" for url, r in answer["engines"].items() if not r["success"]]
        if refused:
            answer["message"] = "; ".join(refused)
        answer["success"] = "message" not in answer
        answer["seconds"] = time.monotonic() - started
        if not answer["success"]:
            logger.error("weight version %d: %s", version, answer["message"])
        return answer

    async def _apply(self, version: int) -> Applied:
        """Apply a version in a thread; wait for it even after the deadline, so that only one writes to the copy."""
        task = asyncio.create_task(asyncio.to_thread(apply, self._source, self._local, version))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            with contextlib.suppress(SlimeError):
                await task
            raise

    async def _load(self, version: int, urls: Sequence[str], deadline: float, flush: bool) -> dict[str, dict[str, Any]]:
        body: dict[str, Any] = {"model_path": str(self._local.resolve()), "weight_version": str(version)}
        if not flush:
            body["flush_cache"] = False
        # `total` ends each call just before the pull's own deadline, so that the results of other calls are kept.
        left = max(deadline - time.monotonic() - 0.5, 0.1)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=left)) as session:
            outcomes = await asyncio.gather(*(_load_one(session, url, body, left) for url in urls))
        return dict(zip(urls, outcomes))


async def _load_one(session: aiohttp.ClientSession, url: str, body: dict[str, Any], left: float) -> dict[str, Any]:
    try:
        async with session.post(f"{url}/update_weights_from_disk", json=body) as response:
            raw = await response.read()
            answer = await response.json(content_type=None) if raw else {}
    except TimeoutError:
        return {"success": False, "message": f"/update_weights_from_disk: no answer within {left:.0f} s"}
    except (aiohttp.ClientError, ValueError) as error:
        return {"success": False, "message": f"/update_weights_from_disk: {type(error).__name__}: {error}"}
    answer = answer if isinstance(answer, dict) else {}
    ok = response.status == 200 and answer.get("success") is True
    message = str(answer.get("message") or f"status {response.status}")
    return {"success": ok, "message": message} | ({"refused": True} if response.status == 400 else {})


async def serve(puller: Puller, host: str, port: int, ready: Callable[[int], None]) -> None:
    """Serve requests until cancelled.

    Args:
        puller: The puller to serve.
        host: Address to listen on.
        port: Port to listen on; 0 picks a free port.
        ready: Called with the port once the server accepts requests.

    Raises:
        OSError: The address is not available.
    """
    runner = web.AppRunner(puller.application(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        ready(runner.addresses[0][1])
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
