"""An `EmbeddedEngine` behind SGLang's and OpenAI's HTTP APIs.

`slime serve` runs the application in its own process; `serve_in_loop` lets the rollout stage expose the engine it
already has, in the same event loop. Nothing on the wire is unpickled, so weights arrive through the disk only.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request, Response

import slime_core
from slime_core.engines.embedded.generate_api import generate_router
from slime_core.engines.embedded.openai_api import openai_router
from slime_core.engines.embedded.wire import BadRequest, ClientGone, error_body, json_response, read_json, take
from slime_core.errors import EngineError, WeightSyncError

if TYPE_CHECKING:
    from slime_core.engines.embedded.engine import EmbeddedEngine

KEEP_ALIVE_S = 3600
"""Clients keep their connections while the loop trains; with uvicorn's 5 s the next rollout would find them closed."""
HEALTH_TIMEOUT_S = 20.0
_DISK_UPDATE_FIELDS = ("model_path", "weight_version", "flush_cache", "abort_all_requests", "load_format")
_NOT_OFFERED = (
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/init_weights_update_group",
)


def create_app(engine: EmbeddedEngine, model_name: str) -> FastAPI:
    """The application; `engine` must be started by the caller."""
    app = FastAPI(title="slime", version=slime_core.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(generate_router(engine))
    app.include_router(openai_router(engine, model_name))
    _add_information(app, engine, model_name)
    _add_control(app, engine)
    _add_weights(app, engine)

    @app.exception_handler(EngineError)
    async def refused(request: Request, error: EngineError) -> Response:
        return _error(request, str(error), 503 if engine.failed else 400)

    @app.exception_handler(ClientGone)
    async def nobody_waits(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(WeightSyncError)
    async def not_synced(request: Request, error: WeightSyncError) -> Response:
        return json_response({"success": False, "message": str(error), **error_body(str(error))}, 400)

    return app


def _error(request: Request, message: str, status: int) -> Response:
    shape = "openai" if request.url.path.startswith("/v1/") else "sglang"
    return json_response(error_body(message, shape, status), status)


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
            return json_response(error_body(f"no token within {HEALTH_TIMEOUT_S:.0f} s (paused?)", code=503), 503)
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

    @app.get("/v1/models")
    async def models() -> Response:
        info = await engine.info()
        card = {
            "id": model_name,
            "object": "model",
            "created": 0,
            "owned_by": "slime",
            "root": info["model_path"],
            "max_model_len": info["max_context_length"],
        }
        return json_response({"object": "list", "data": [card]})


def _add_control(app: FastAPI, engine: EmbeddedEngine) -> None:
    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Response:
        await engine.flush_cache()
        return Response("Cache flushed.\n", media_type="text/plain")

    @app.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        body = await read_json(request, {"rid", "abort_all"})
        rid = take(body, "rid", str, "")
        everything = take(body, "abort_all", bool, False)
        if not rid and not everything:
            raise BadRequest('abort_request needs {"rid": "..."} or {"abort_all": true}')
        await engine.abort(None if everything else rid)
        return Response()

    @app.post("/pause_generation")
    async def pause_generation(request: Request) -> Response:
        mode = take(await read_json(request, {"mode"}), "mode", str, "abort")
        await engine.pause(mode)
        return json_response({"status": "ok", "message": f"paused ({mode})"})

    @app.post("/continue_generation")
    async def continue_generation() -> Response:
        await engine.resume()
        return json_response({"status": "ok", "message": "continued"})

    @app.post("/release_memory_occupation")
    async def release_memory_occupation(request: Request) -> Response:
        await engine.release_memory(take(await read_json(request, {"tags"}), "tags", list, []) or None)
        return Response()

    @app.post("/resume_memory_occupation")
    async def resume_memory_occupation(request: Request) -> Response:
        await engine.resume_memory(take(await read_json(request, {"tags"}), "tags", list, []) or None)
        return Response()


def _add_weights(app: FastAPI, engine: EmbeddedEngine) -> None:
    @app.post("/update_weights_from_disk")
    async def update_weights_from_disk(request: Request) -> Response:
        body = await read_json(request, _DISK_UPDATE_FIELDS)
        path = _update_path(body)
        if take(body, "abort_all_requests", bool, False):
            await engine.abort()
        version, label = await _version(engine, body.get("weight_version"))
        await engine.update_weights_from_disk(Path(path), version)
        await engine.set_weight_version(version, label)
        return json_response({"success": True, "message": f"loaded {path}", "weight_version": label})

    @app.post("/update_weight_version")
    async def update_weight_version(request: Request) -> Response:
        body = await read_json(request, {"new_version", "abort_all_requests"})
        if body.get("new_version") is None:
            raise BadRequest('update_weight_version needs {"new_version": "..."}')
        if take(body, "abort_all_requests", bool, False):
            await engine.abort()
        version, label = await _version(engine, body["new_version"])
        await engine.set_weight_version(version, label)
        return json_response({"success": True, "message": "weight version updated", "new_version": label})

    @app.api_route("/weights_checker", methods=["GET", "POST"])
    async def weights_checker(request: Request) -> Response:
        action = take(await read_json(request, {"action"}), "action", str, "checksum")
        if action != "checksum":
            raise BadRequest(f"action is {action!r}; allowed: checksum")
        return json_response({"success": True, "checksums": await engine.weight_checksums()})

    async def not_offered(request: Request) -> Response:
        return _error(
            request,
            f"{request.url.path} is not offered: it would mean unpickling what the network sends."
            " Write the weights to a directory and POST /update_weights_from_disk.",
            400,
        )

    for path in _NOT_OFFERED:
        app.add_api_route(path, not_offered, methods=["POST"])


def _update_path(body: dict[str, Any]) -> str:
    """Where the new weights are. Raises BadRequest, also for what this engine would have to ignore."""
    path = take(body, "model_path", str, "")
    if not path:
        raise BadRequest('update_weights_from_disk needs {"model_path": "an HF-layout directory"}')
    if body.get("load_format") not in (None, "auto", "safetensors"):
        raise BadRequest(f"load_format is {body['load_format']!r}; allowed: auto, safetensors")
    if not take(body, "flush_cache", bool, True):
        raise BadRequest("flush_cache is false; allowed: true (prefixes of the old weights would be wrong)")
    return path


async def _version(engine: EmbeddedEngine, raw: Any) -> tuple[int, str]:
    """The number tokens carry and the label that is reported; a label that is no number counts up."""
    if raw is not None and not isinstance(raw, str | int):
        raise BadRequest(f"weight_version is {raw!r}; allowed: a string or an integer")
    current = engine.weight_version
    label = str(current + 1) if raw is None else str(raw)
    number = int(label) if label.isdecimal() and len(label) < 19 else current + 1  # it travels as a 64-bit integer
    return number, label


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises EngineError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except (OSError, OverflowError) as error:
        sock.close()
        raise EngineError(
            f"cannot listen on {host}:{port} ({error}); choose another --port, 0 for a free one"
        ) from error
    sock.set_inheritable(True)
    return sock


async def serve_in_loop(engine: EmbeddedEngine, host: str, port: int) -> tuple[str, int, Callable[[], Awaitable[None]]]:
    """Serve a started engine in the running loop.

    Returns:
        The host and port bound (port 0 chooses a free one), and a coroutine function that stops serving; the engine
        stays up.
    """
    return await serve_socket(engine, bind(host, port))


async def serve_socket(
    engine: EmbeddedEngine, sock: socket.socket, model_name: str | None = None
) -> tuple[str, int, Callable[[], Awaitable[None]]]:
    """`serve_in_loop` on a socket from `bind`; `model_name` defaults to the model directory."""
    app = create_app(engine, model_name or str((await engine.info())["model_path"]))
    server = _Server(
        uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=KEEP_ALIVE_S)
    )
    task = asyncio.create_task(server.serve(sockets=[sock]), name="slime-engine-server")
    while not server.started:
        if task.done():
            await task
        await asyncio.sleep(0.005)
    host, port = sock.getsockname()[:2]

    async def stop() -> None:
        server.should_exit = True
        server.force_exit = True
        await task
        sock.close()

    return str(host), int(port), stop


class _Server(uvicorn.Server):
    """Leaves signal handling to whoever owns the loop."""

    def capture_signals(self) -> Any:
        """No handlers."""
        from contextlib import nullcontext

        return nullcontext()
