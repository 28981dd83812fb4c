"""SGLang's control calls -> vLLM's, so that one client, one supervisor and one weight update serve both.

    the shared code --> /pause_generation --> VllmHttp --> POST /pause?mode=keep&clear_cache=true --> server

Written for vLLM 0.32.0 with `VLLM_SERVER_DEV_MODE=1`. Kept requests compute their keys and values again after a pause
that clears the cache, as SGLang's "retract" does; without, they continue with those of the old weights ("in_place").
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from typing import Any

import orjson
from slime_engine_http.api.transport import MODEL_INFO, SERVER_INFO, Answer, Http, engine_error, expecting

from slime_core.errors import EngineError
from slime_engine_vllm.environment import PLAIN_LINEAR
from slime_engine_vllm.wire import PREFIX, VllmWire

Call = Callable[..., Awaitable[Answer]]
"""`Http.send` of one server, without the URL."""
_PAUSES = {
    "retract": "mode=keep&clear_cache=true",
    "in_place": "mode=keep&clear_cache=false",
    "abort": "mode=abort&clear_cache=true",
}
_LOADS = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{.*\})? (\S+)$", re.MULTILINE)
_EMPTY = sha256(b"").hexdigest()
_UPDATES = ("/update_weights_from_tensor", "/update_weights_from_distributed", "/update_weights_from_disk")


class VllmHttp(Http):
    """An HTTP client that takes SGLang's calls and sends vLLM's; other paths are sent as they are."""

    async def send(self, method: str, url: str, path: str, body: Mapping[str, Any] | None = None, **how: Any) -> Answer:
        """Send a call as `Http.send` does. Raises EngineError."""

        async def call(method: str, path: str, body: Mapping[str, Any] | None = None, **more: Any) -> Answer:
            return await Http.send(self, method, url, path, body, **{**how, **more})

        translate = _TRANSLATIONS.get(path)
        return await (call(method, path, body) if translate is None else translate(call, url, body or {}, how))


async def _abort(call: Call, url: str, body: Mapping[str, Any], how: Mapping[str, Any]) -> Answer:
    if body.get("abort_all"):
        return await call("POST", "/abort_requests", {})
    return await call("POST", "/inference/v1/abort_requests", {"request_ids": [PREFIX + str(body["rid"])]})


async def _pause(call: Call, url: str, body: Mapping[str, Any], how: Mapping[str, Any]) -> Answer:
    return await call("POST", f"/pause?{_PAUSES[body['mode']]}")


async def _resume(call: Call, url: str, body: Mapping[str, Any], how: Mapping[str, Any]) -> Answer:
    return await call("POST", "/resume")


async def _flush(call: Call, url: str, body: Mapping[str, Any], how: Mapping[str, Any]) -> Answer:
    return await call("POST", "/reset_prefix_cache")


async def _health(call: Call, url: str, body: Mapping[str, Any], how: Mapping[str, Any]) -> Answer:
    """Return status 503 for a paused server, as SGLang does."""
    healthy = await call("GET", "/health")
    if healthy.status != 200 or not (await call("GET", "/is_paused")).object().get("is_paused"):
        return healthy
    if 503 in how.get("accept", ()):
        return healthy._replace(status=503)
    raise engine_error(f"{url}/health", "it is paused", 503)


async def _generates(call: Call, url: str, body: Mapping[str, Any], how: Mapping[str, Any]) -> Answer:
    """Generate a token: /health does not notice a process that hangs."""
    return await call("POST", VllmWire.path, {"token_ids": [0], "sampling_params": {"max_tokens": 1}, "stream": False})


async def _model_info(call: Call, url: str, body: Mapping[str, Any], how: Mapping[str, Any]) -> Answer:
    model, weights = await _model(call, url), (await call("GET", "/weight_info")).object()
    if "weight_version" not in weights:
        raise EngineError(f"{url}/weight_info: no weight_version")
    return _answer(url, MODEL_INFO, {"model_path": model["root"], "weight_version": str(weights["weight_version"])})


async def _server_info(call: Call, url: str, body: Mapping[str, Any], how: Mapping[str, Any]) -> Answer:
    model, version = await _model(call, url), (await call("GET", "/version")).object()
    world = (await call("GET", "/get_world_size")).object()
    loads = {"num_running": 0, "num_waiting": 0}
    for kind, count in _LOADS.findall((await call("GET", "/metrics")).body.decode()):
        loads[f"num_{kind}"] += int(float(count))
    info = {
        "version": str(version.get("version", "")),
        "max_context_length": model.get("max_model_len"),
        "tp_size": world.get("world_size", 1),  # all processes, which is what an update has to reach
        "file_sessions": True,
    }
    return _answer(url, SERVER_INFO, info | loads)


async def _model(call: Call, url: str) -> Mapping[str, Any]:
    models = (await call("GET", "/v1/models")).json()
    with expecting("a list of models, each with its root", f"{url}/v1/models", models):
        return dict(models["data"][0])


async def _begin(call: Call, url: str, body: Mapping[str, Any], how: Mapping[str, Any]) -> Answer:
    return await _update_step(call, "/start_weight_update", {})


async def _load(call: Call, url: str, body: Mapping[str, Any], how: Mapping[str, Any]) -> Answer:
    return await _update_step(call, "/update_weights", {"update_info": dict(body)})


async def _end(call: Call, url: str, body: Mapping[str, Any], how: Mapping[str, Any]) -> Answer:
    return await _update_step(call, "/finish_weight_update", body)


async def _join(call: Call, url: str, body: Mapping[str, Any], how: Mapping[str, Any]) -> Answer:
    return await _update_step(call, "/init_weight_transfer_engine", {"init_info": dict(body)})


async def _leave(call: Call, url: str, body: Mapping[str, Any], how: Mapping[str, Any]) -> Answer:
    return await _update_step(call, "/init_weight_transfer_engine", {"init_info": {"leave": body["group_name"]}})


async def _update_step(call: Call, path: str, body: Mapping[str, Any]) -> Answer:
    """Call a step of an update. vLLM reports everything as status 500; a refusal of a live server becomes 400.

    After status 500 vLLM resets the connection, so no connection is used twice.
    """
    try:
        return await call("POST", path, body, headers={"Connection": "close"})
    except EngineError as error:
        if error.status == 500 and "EngineDead" not in str(error):
            error.status = 400
        raise


async def _checksums(call: Call, url: str, body: Mapping[str, Any], how: Mapping[str, Any]) -> Answer:
    path = "/weight_checker"
    answer = (await call("POST", path, body)).json()
    with expecting("checksums by name", url + path, answer):
        found = dict(answer["checksums"])
    if packed := sorted(name for name, checksum in found.items() if checksum == _EMPTY):
        raise engine_error(
            url + path,
            f"{packed[0]} and {len(packed) - 1} more have no elements, as oneDNN computes from packed copies; start the"
            f" server with {PLAIN_LINEAR}=1",
            400,
        )
    return _answer(url, "/weights_checker", {"ranks": [{"checksums": found}]})


def _answer(url: str, path: str, body: Mapping[str, Any]) -> Answer:
    return Answer(url + path, 200, orjson.dumps(body), {"Content-Type": "application/json"})


_TRANSLATIONS = {
    "/abort_request": _abort,
    "/pause_generation": _pause,
    "/continue_generation": _resume,
    "/flush_cache": _flush,
    "/health": _health,
    "/health_generate": _generates,
    MODEL_INFO: _model_info,
    SERVER_INFO: _server_info,
    "/begin_weight_update": _begin,
    "/end_weight_update": _end,
    "/init_weights_update_group": _join,
    "/destroy_weights_update_group": _leave,
    "/weights_checker": _checksums,
    **dict.fromkeys(_UPDATES, _load),
}
