"""Serve an `EmbeddedEngine` through SGLang's native HTTP API.

`slime serve` runs the application in its own process; `serve_in_loop` gives a rollout's engine an address in the same
event loop. Received data is never unpickled, so weights are updated from disk only. The routes of OpenAI's and
Anthropic's APIs are in `front`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastapi import FastAPI, Request, Response

import slime_core
from slime_core.errors import WeightSyncError
from slime_core.protocols import Args
from slime_serving.front.engine_desk import add_routes
from slime_serving.http.application import application, bind, listen
from slime_serving.http.bodies import Body, JsonRoute
from slime_serving.http.errors import BadRequest, Refused, sglang_shape
from slime_serving.http.guard import KEY_VARIABLE, Access, is_local
from slime_serving.http.streams import json_response
from slime_serving.native_generate import add_generate

if TYPE_CHECKING:
    from slime_embedded.engine.engine import EmbeddedEngine

HEALTH_TIMEOUT_S = 20.0
_NOT_OFFERED = (
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/init_weights_update_group",
)
_Version = str | int


class _AbortBody(Body):
    """The body of `/abort_request`."""

    rid: str = ""
    abort_all: bool = False
    no_effect = frozenset({"finished_reason", "abort_message"})


class _PauseBody(Body):
    """The body of `/pause_generation`."""

    mode: Literal["abort", "in_place", "retract"] = "abort"


class _MemoryBody(Body):
    """The body of `/release_memory_occupation` and `/resume_memory_occupation`."""

    tags: list[str] = []


class _FlushBody(Body):
    """The body of a route without parameters."""

    no_effect = frozenset({"timeout", "torch_empty_cache"})


class _DiskBody(Body):
    """The body of `/update_weights_from_disk`."""

    model_path: str
    weight_version: _Version | None = None
    abort_all_requests: bool = False
    only = {
        "load_format": ("auto", "safetensors"),
        "flush_cache": (True,),  # prefixes of the old weights would be wrong
        "is_async": (False,),
        "keep_pause": (False,),
        "recapture_cuda_graph": (False,),
        "torch_empty_cache": (False,),
    }


class _VersionBody(Body):
    """The body of `/update_weight_version`."""

    new_version: _Version
    abort_all_requests: bool = False


class _CheckerBody(Body):
    """The body of `/weights_checker`."""

    action: Literal["checksum"] = "checksum"


def create_app(engine: EmbeddedEngine, model_name: str, *, args: Args, access: Access | None = None) -> FastAPI:
    """Return the application; the caller must start `engine`."""
    app = application(access, failed=lambda: engine.failed)
    app.state.model_name = model_name
    app.router.route_class = JsonRoute
    add_generate(app, engine)
    _add_information(app, engine, model_name)
    _add_control(app, engine)
    _add_weights(app, engine)
    add_routes(app, engine, args)

    @app.exception_handler(WeightSyncError)
    async def not_synced(request: Request, error: WeightSyncError) -> Response:
        return json_response({"success": False, "message": str(error), **sglang_shape(400, str(error))}, 400)

    return app


def _add_information(app: FastAPI, engine: EmbeddedEngine, model_name: str) -> None:
    @app.get("/health")
    async def health() -> Response:
        await engine.info()
        return Response()

    @app.get("/health_generate")
    async def health_generate() -> Response:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await engine.generate([0], {"max_new_tokens": 1, "temperature": 0})
        except TimeoutError:
            raise Refused(503, f"no token within {HEALTH_TIMEOUT_S:.0f} s (paused?)") from None
        return Response()

    @app.get("/get_model_info")
    @app.get("/model_info")
    async def model_info() -> Response:
        info = await engine.info()
        keys = ("model_path", "model_type", "weight_version", "max_context_length")
        fixed = {"tokenizer_path": info["model_path"], "is_generation": True, "served_model_name": model_name}
        return json_response({key: info[key] for key in keys} | fixed)

    @app.get("/get_server_info")
    @app.get("/server_info")
    async def server_info() -> Response:
        fixed = {"version": f"slime {slime_core.__version__}", "tp_size": 1, "pp_size": 1, "dp_size": 1}
        return json_response(await engine.info() | fixed)

    @app.get("/v1/loads")
    async def loads() -> Response:
        info = await engine.info()
        load = {
            "dp_rank": 0,
            "num_running_reqs": info["num_running"],
            "num_waiting_reqs": info["num_waiting"],
            "num_total_reqs": info["num_running"] + info["num_waiting"],
            "num_used_tokens": info["num_used_tokens"],
            "max_total_num_tokens": info["max_total_num_tokens"],
        }
        return json_response({"loads": [load]})


def _add_control(app: FastAPI, engine: EmbeddedEngine) -> None:
    @app.post("/flush_cache")
    async def flush_cache(body: _FlushBody | None = None) -> Response:
        await engine.flush_cache()
        return Response("Cache flushed.\n", media_type="text/plain")

    @app.post("/abort_request")
    async def abort_request(body: _AbortBody) -> Response:
        if not body.rid and not body.abort_all:
            raise BadRequest('abort_request needs {"rid": "..."} or {"abort_all": true}')
        await engine.abort(None if body.abort_all else body.rid)
        return Response()

    @app.post("/pause_generation")
    async def pause_generation(body: _PauseBody | None = None) -> Response:
        mode = (body or _PauseBody()).mode
        await engine.pause(mode)
        return json_response({"status": "ok", "message": f"paused ({mode})"})

    @app.post("/continue_generation")
    async def continue_generation(body: _FlushBody | None = None) -> Response:
        await engine.resume()
        return json_response({"status": "ok", "message": "continued"})

    @app.post("/release_memory_occupation")
    async def release_memory_occupation(body: _MemoryBody | None = None) -> Response:
        await engine.release_memory((body or _MemoryBody()).tags or None)
        return Response()

    @app.post("/resume_memory_occupation")
    async def resume_memory_occupation(body: _MemoryBody | None = None) -> Response:
        await engine.resume_memory((body or _MemoryBody()).tags or None)
        return Response()


def _add_weights(app: FastAPI, engine: EmbeddedEngine) -> None:
    @app.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: _DiskBody) -> Response:
        if body.abort_all_requests:
            await engine.abort()
        version, label = _version(engine, body.weight_version)
        await engine.update_weights_from_disk(Path(body.model_path), version)
        await engine.set_weight_version(version, label)
        return json_response({"success": True, "message": f"loaded {body.model_path}", "weight_version": label})

    @app.post("/update_weight_version")
    async def update_weight_version(body: _VersionBody) -> Response:
        if body.abort_all_requests:
            await engine.abort()
        version, label = _version(engine, body.new_version)
        await engine.set_weight_version(version, label)
        return json_response({"success": True, "message": "weight version updated", "new_version": label})

    @app.post("/weights_checker")
    async def weights_checker(body: _CheckerBody | None = None) -> Response:
        return json_response({"success": True, "checksums": await engine.weight_checksums()})

    async def not_offered(request: Request) -> Response:
        raise BadRequest(
            f"{request.url.path} is not offered: it would mean unpickling what the network sends."
            " Write the weights to a directory and POST /update_weights_from_disk."
        )

    for path in _NOT_OFFERED:
        app.add_api_route(path, not_offered, methods=["POST"])


def _version(engine: EmbeddedEngine, raw: _Version | None) -> tuple[int, str]:
    """Return the version number of tokens and the reported label; a label without a number increments the version."""
    current = engine.weight_version
    label = str(current + 1) if raw is None else str(raw)
    number = int(label) if label.isdecimal() and len(label) < 19 else current + 1  # it travels as a 64-bit integer
    return number, label


async def serve_in_loop(engine: EmbeddedEngine, host: str, port: int) -> tuple[str, int, Callable[[], Awaitable[None]]]:
    """Serve a started engine in the running loop; without SLIME_API_KEY, remote clients can only generate.

    Returns:
        The host and port bound (port 0 chooses a free one), and a coroutine function that stops serving; the engine
        stays up.
    """
    key = os.environ.get(KEY_VARIABLE) or None
    shut = key is None and not is_local(host)
    return await serve_socket(engine, bind(host, port), access=Access(key, frozenset({host}), shut))


async def serve_socket(
    engine: EmbeddedEngine, sock: socket.socket, model_name: str | None = None, access: Access | None = None
) -> tuple[str, int, Callable[[], Awaitable[None]]]:
    """Serve as `serve_in_loop`, on a socket from `bind`; `model_name` defaults to the model directory."""
    name = model_name or str((await engine.info())["model_path"])
    return await listen(create_app(engine, name, args=engine.args, access=access), sock)
