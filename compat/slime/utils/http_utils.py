"""`slime.utils.http_utils`: `await post(url, payload)`, `await get(url)`, and helpers for hosts and ports.

Only errors that may be temporary are retried (failed connections, 408, 429, 5xx), and all attempts share one deadline.
THUDM/slime repeats up to 60 times after any error, without a deadline. As in THUDM/slime, proxies of the environment
are not used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import socket
import time
from collections.abc import AsyncGenerator, Mapping
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from slime import _missing

if TYPE_CHECKING:
    import aiohttp

RETRY_STATUS = frozenset({408, 429, 500, 502, 503, 504})
LONGEST_PAUSE = 5.0
KEEP_ALIVE = 4.0
"""Seconds to keep an idle connection; slime's servers, like uvicorn, close it after five idle seconds."""
_PREFER_IPV6 = "SLIME_PREFER_IPV6"


class _Settings:
    """Settings of the process's HTTP clients; `init_http_client` sets them."""

    connections = 512
    timeout = 3600.0


_sessions: dict[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, AsyncGenerator[None, None]]] = {}


def init_http_client(args: Any) -> None:
    """Set the number of connections (`--sglang-server-concurrency`) and the deadline of a request
    (`--rollout-timeout`) from the run's settings. Open clients keep their values.
    """
    _Settings.connections = int(getattr(args, "sglang_server_concurrency", None) or _Settings.connections)
    _Settings.timeout = float(getattr(args, "rollout_timeout", None) or _Settings.timeout)


async def post(
    url: str,
    payload: Any,
    max_retries: int = 60,
    action: str = "post",
    headers: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> Any:
    """Send `payload` and return the JSON of the response; its text if it is not JSON.

    Args:
        url: Address of the request.
        payload: Payload, sent as JSON.
        max_retries: Maximum number of attempts.
        action: "post", "put", "patch", "delete" or "get".
        headers: Headers to add to the request.
        timeout: Seconds for all attempts and the pauses between them; by default `--rollout-timeout`.

    Raises:
        aiohttp.ClientResponseError: The server refused, or kept failing; the message has its response.
        aiohttp.ClientError: The server could not be reached.
        TimeoutError: Attempts and pauses took longer than the deadline.
    """
    return await _request(action, url, payload, max_retries, headers, timeout)


async def get(url: str, max_retries: int = 60, timeout: float | None = None) -> Any:
    """Send a GET request; attempts, deadline and errors as for `post`."""
    return await _request("get", url, None, max_retries, None, timeout)


async def _request(
    method: str, url: str, payload: Any, attempts: int, headers: Mapping[str, str] | None, timeout: float | None
) -> Any:
    import aiohttp

    client = await _client()
    seconds = _Settings.timeout if timeout is None else timeout
    started = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            for attempt in range(1, max(attempts, 1) + 1):
                try:
                    async with client.request(method.upper(), url, json=payload, headers=headers) as answer:
                        body = await answer.read()
                    if answer.ok:
                        return _decoded(body)
                    problem: aiohttp.ClientError = aiohttp.ClientResponseError(
                        answer.request_info,
                        answer.history,
                        status=answer.status,
                        message=f"{method.upper()} {url}: {body[:300].decode(errors='replace')}",
                    )
                    if answer.status not in RETRY_STATUS:
                        raise problem
                except (aiohttp.InvalidURL, aiohttp.ClientResponseError):
                    raise
                except aiohttp.ClientError as error:
                    problem = error
                if attempt >= attempts:
                    raise problem
                await asyncio.sleep(min(0.1 * 2 ** min(attempt - 1, 10), LONGEST_PAUSE))
    except TimeoutError:
        raise TimeoutError(
            f"{method.upper()} {url}: no answer within {seconds:g} s (--rollout-timeout, or timeout=), after"
            f" {time.monotonic() - started:.1f} s"
        ) from None
    raise AssertionError("the last attempt returns or raises")


async def stream_events(
    url: str, payload: Any, *, headers: Mapping[str, str] | None = None, timeout: float | None = None
) -> AsyncGenerator[dict[str, Any], None]:
    """Send `payload` and yield the events as they arrive; no retries. Closing the generator ends the request.

    Args:
        url: Address of the request.
        payload: Payload, sent as JSON.
        headers: Headers to add to the request.
        timeout: Seconds until the next bytes; by default `--rollout-timeout`.

    Raises:
        aiohttp.ClientResponseError: The server refused.
        aiohttp.ClientError: The server could not be reached, or the connection broke.
        TimeoutError: No bytes in time.
    """
    import aiohttp

    client = await _client()
    limits = aiohttp.ClientTimeout(total=None, sock_read=_Settings.timeout if timeout is None else timeout)
    async with client.post(url, json=payload, headers=headers, timeout=limits) as answer:
        if not answer.ok:
            body = (await answer.read())[:300].decode(errors="replace")
            raise aiohttp.ClientResponseError(
                answer.request_info, answer.history, status=answer.status, message=f"POST {url}: {body}"
            )
        rest = b""
        async for chunk in answer.content.iter_any():  # line length is unbounded: an event holds all tokens so far
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if data and data != b"[DONE]":
                    yield json.loads(data)


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


async def _client() -> aiohttp.ClientSession:
    """Return the running loop's client; it is closed when the loop shuts its generators down, as `asyncio.run` does."""
    import aiohttp

    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        for old in [old for old in _sessions if old.is_closed()]:
            del _sessions[old]
        client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=_Settings.connections, keepalive_timeout=KEEP_ALIVE),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        ending = _ends_with(loop, client)
        _sessions[loop] = client, ending
        await anext(ending)
    return _sessions[loop][0]


async def _ends_with(loop: asyncio.AbstractEventLoop, client: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        _sessions.pop(loop, None)
        await client.close()


def wrap_ipv6(host: str) -> str:
    """Return an IPv6 address in brackets, as URLs need it, and any other host unchanged."""
    try:
        bare = host.strip("[]")
        return f"[{bare}]" if ipaddress.ip_address(bare).version == 6 else host
    except ValueError:
        return host


_wrap_ipv6 = wrap_ipv6


def get_rollout_num_engines(args: Any) -> int:
    """Return the number of engines behind the router: from `--rollout-external-engine-addrs`, else 1."""
    return len(getattr(args, "rollout_external_engine_addrs", None) or [None])


def is_port_available(port: int) -> bool:
    """Return whether this host can listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except (OSError, OverflowError):
            return False
    return True


def find_available_port(base_port: int) -> int:
    """Return the first free port from `base_port` on. Raises OSError if no port is free."""
    for port in range(base_port, 65536):
        if is_port_available(port):
            return port
    raise OSError(f"no free port from {base_port} on")


def get_host_info() -> tuple[str, str]:
    """Return name and address of this host; `SLIME_HOST_IP` sets the address, `SLIME_PREFER_IPV6` its family."""
    name = socket.gethostname()
    given = os.environ.get("SLIME_HOST_IP")
    if given:
        return name, given
    families = [socket.AF_INET, socket.AF_INET6]
    if os.environ.get(_PREFER_IPV6, "").lower() in ("1", "true", "yes"):
        families.reverse()
    for family in families:
        # No packet is sent: connecting a datagram socket only chooses the outgoing address.
        target = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))
                return name, str(probe.getsockname()[0])
            except OSError:
                continue
    return name, "127.0.0.1"


def terminate_process(process: BaseProcess, timeout: float = 1.0) -> None:
    """Terminate a process, and kill it after `timeout` seconds; safe for a process that has ended."""
    if not process.is_alive():
        return
    process.terminate()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()


__all__ = [
    "find_available_port",
    "get",
    "get_host_info",
    "get_rollout_num_engines",
    "init_http_client",
    "is_port_available",
    "post",
    "stream_events",
    "terminate_process",
    "wrap_ipv6",
]
__getattr__ = _missing.names(__name__)
