"""A session of an OpenEnv server: reset and steps over one WebSocket, or over HTTP where a server keeps one episode.

    reset   {"type": "reset", "data": {"seed": 7, ...}}     POST /reset {"seed": 7, ...}
    step    {"type": "step", "data": ACTION}                POST /step  {"action": ACTION}
    close   {"type": "close"}, and the connection           the connections

OpenEnv's own server (openenv-core 0.3.0) makes a new environment for every HTTP request, so POST /step never acts in
what POST /reset began; only its WebSocket (/ws) has sessions. `transport: http` is for servers that keep an episode
themselves, told apart by the `episode_id` that is sent with both.

Tried again: connecting, and over HTTP a reset (both change nothing that is kept). A step never: it may have happened.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from typing import Any, Literal

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_incrementing

from slime_core import Args, PluginOptions, Sample, Step, options
from slime_core.errors import ConfigError, PluginError
from slime_core.waits import waiting


class Options(PluginOptions):
    """Options that a user may set: `--set plugins.openenv.url=http://localhost:8000`."""

    url: str = ""
    """URL of the server; a row's metadata may name another server as openenv_url."""
    transport: Literal["websocket", "http"] = "websocket"
    """Transport: websocket is OpenEnv's own; http is for servers that keep an episode by its episode_id."""
    action_field: str = "message"
    """Field of the action that gets the policy's text; "" sends a turn that is a JSON object as the action."""
    observation_field: str = ""
    """Field of the observation that the policy sees; "" shows all of it as JSON, or as text if it is a single field."""
    connect_timeout: float = 10.0
    """Seconds to connect; --environment-step-timeout limits every call as a whole."""
    connect_tries: int = 3
    """Number of attempts to connect and, over HTTP, to reset."""


class OpenEnv:
    """A session of an OpenEnv server; its methods are coroutines of the event loop."""

    def __init__(self, args: Args) -> None:
        self._own = options(args, "openenv", Options)
        self._url = self._own.url
        self._episode = uuid.uuid4().hex
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, sample: Sample) -> str:
        """Begin with the row's `openenv_reset`; the group's number is the seed if `openenv_reset` has none.

        Raises:
            ConfigError: No url is set.
            PluginError: The server cannot be reached, or answers an error.
        """
        self._url = str(sample.metadata.get("openenv_url") or self._url).rstrip("/")
        if not self._url:
            raise ConfigError("plugins.openenv.url is not set; type --set plugins.openenv.url=http://HOST:PORT")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._own.connect_timeout)
        self._http = aiohttp.ClientSession(timeout=timeout)
        request = {"seed": sample.group_index or 0, **dict(sample.metadata.get("openenv_reset") or {})}
        if self._own.transport == "http":
            answer = await self._tried(lambda: self._post("/reset", {"episode_id": self._episode, **request}))
        else:
            self._socket = await self._tried(self._connected)
            answer = await self._told({"type": "reset", "data": request})
        return self._shown(answer)

    async def step(self, action: str) -> Step:
        """Send one action. Return the schema's error to the policy as text; raise if the session is broken."""
        if self._own.action_field:
            sent: Any = {self._own.action_field: action}
        else:
            try:
                sent = json.loads(action)
            except ValueError:
                sent = None
            if not isinstance(sent, dict):
                return Step("Write the action as one JSON object.")
        try:
            if self._own.transport == "http":
                answer = await self._post("/step", {"episode_id": self._episode, "action": sent})
            else:
                answer = await self._told({"type": "step", "data": sent})
        except _NotTaken as problem:
            return Step(f"The action was not taken: {problem}", info={"not_taken": str(problem)})
        return Step(self._shown(answer) or "(nothing)", float(answer.get("reward") or 0.0), bool(answer.get("done")))

    async def close(self) -> None:
        """Send the server a close message and close the connections."""
        try:
            if self._socket is not None and not self._socket.closed:
                with waiting("an OpenEnv session to close", deadline=self._own.connect_timeout, then="it is dropped"):
                    async with asyncio.timeout(self._own.connect_timeout):
                        await self._socket.send_json({"type": "close"})
                        await self._socket.close()
        except (TimeoutError, aiohttp.ClientError, ConnectionError):  # the server is gone, and the session with it
            pass
        finally:
            if self._http is not None:
                await self._http.close()

    # -- talking -------------------------------------------------------------------------------------

    async def _tried(self, call: Any) -> Any:
        async def once() -> Any:
            return await call()

        passing = (aiohttp.ClientConnectionError, aiohttp.WSServerHandshakeError)
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self._own.connect_tries), wait=wait_incrementing(0.1, 0.1),
            retry=retry_if_exception_type(passing), reraise=True,
        )  # fmt: skip
        try:
            return await attempts(once)
        except passing as error:
            raise PluginError(f"OpenEnv server {self._url}: {error}") from error

    async def _connected(self) -> aiohttp.ClientWebSocketResponse:
        assert self._http is not None
        with waiting(f"a connection to {self._url}", deadline=self._own.connect_timeout, then="it is tried again"):
            return await self._http.ws_connect(f"{self._url}/ws", max_msg_size=1 << 26)

    async def _told(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message over the socket. An error of the action raises _NotTaken; any other error ends the session."""
        assert self._socket is not None, "reset comes first"
        with waiting(f"{self._url}: {message['type']}", deadline=None, then="--environment-step-timeout ends it"):
            try:
                await self._socket.send_json(message)
                answer = await self._socket.receive()
            except (aiohttp.ClientError, ConnectionError) as error:
                raise PluginError(f"OpenEnv server {self._url}: {type(error).__name__}: {error}") from error
        if answer.type != aiohttp.WSMsgType.TEXT:
            raise PluginError(f"OpenEnv server {self._url} closed the session ({answer.type.name})")
        body = json.loads(answer.data)
        data: dict[str, Any] = body.get("data") or {}
        if body.get("type") != "error":
            return data
        if data.get("code") == "VALIDATION_ERROR":
            raise _NotTaken(str(data.get("message") or data))
        raise PluginError(f"OpenEnv server {self._url}: {data.get('code')}: {data.get('message')}")

    async def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._http is not None, "reset comes first"
        with waiting(f"POST {self._url}{path}", deadline=None, then="--environment-step-timeout ends it"):
            async with self._http.post(self._url + path, json=body) as response:
                text = await response.text()
        if response.status == 422:
            raise _NotTaken(text[:500])
        if response.status != 200:
            raise PluginError(f"POST {self._url}{path}: {response.status} {text[:500]}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _shown(self, answer: Mapping[str, Any]) -> str:
        """Return the observation as text."""
        observation = answer.get("observation") or {}
        if not isinstance(observation, Mapping):
            return str(observation)
        if self._own.observation_field:
            return str(observation.get(self._own.observation_field, ""))
        kept = {k: v for k, v in observation.items() if k not in ("reward", "done", "metadata")}
        (only,) = kept.values() if len(kept) == 1 else (None,)
        return only if isinstance(only, str) else json.dumps(kept, sort_keys=True)


class _NotTaken(Exception):
    """The server refused the action itself."""
