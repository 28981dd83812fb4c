"""POST JSON and get JSON back, with retries and a deadline: what rewards and other plugins talk to services with.

One client serves any number of event loops: each gets a session of its own, which is
closed when the loop is shut down (`asyncio.run` does that). Only what may pass is tried again - connections that fail,
429 and 5xx; any other answer is the service's last word.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from slime_core.errors import PluginError

if TYPE_CHECKING:
    import aiohttp
    from tenacity import RetryCallState

FIRST_DELAY_S, LONGEST_DELAY_S = 0.25, 30.0
_KEEP_ALIVE_S = 4.0
"""Many servers hang up after five idle seconds; a connection they are about to close is no use."""
_SHOWN = 200


class JsonClient:
    """`await client.post(url, body)`; proxies come from the environment (HTTP_PROXY, NO_PROXY)."""

    def __init__(self, *, connections: int = 64, attempts: int = 10) -> None:
        """At most `connections` requests at a time per event loop; the others wait, within their deadline."""
        self._connections = connections
        self._attempts = attempts
        self._sessions: dict[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, AsyncGenerator[None, None]]] = {}
        self._proxies: dict[tuple[str, str], str | None] = {}

    async def post(
        self, url: str, body: Any, *, headers: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> Any:
        """The JSON that the service answers `body` with.

        Args:
            url: Where to.
            body: What `json.dumps` takes.
            headers: Added to the request.
            timeout: Seconds for all attempts and the pauses between them; None waits for ever.

        Raises:
            PluginError: The service refused, kept failing until attempts or time ran out, or answered no JSON.
            TypeError, ValueError: `body` is no JSON.
        """
        from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, stop_before_delay, stop_never

        session = await self._session()
        data = json.dumps(body, allow_nan=False).encode()
        given = {"Content-Type": "application/json", **(headers or {})}
        in_time = stop_never if timeout is None else stop_before_delay(timeout)
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self._attempts) | in_time, wait=_pause, retry=retry_if_exception_type(_MayPass),
            reraise=True,
        )  # fmt: skip
        started = time.monotonic()

        async def once() -> Any:
            rest = None if timeout is None else max(started + timeout - time.monotonic(), 0.0)
            try:
                return await self._once(session, url, data, given, rest)
            except TimeoutError:
                which = attempts.statistics["attempt_number"]
                raise PluginError(f"POST {url}: no answer within {timeout or 0.0:.3g} s (attempt {which})") from None

        try:
            return await attempts(once)
        except _MayPass as last:
            count = attempts.statistics["attempt_number"]
            spent = time.monotonic() - started
            raise PluginError(f"POST {url}: {count} attempts in {spent:.1f} s; last: {last}") from None

    async def _once(
        self, session: aiohttp.ClientSession, url: str, data: bytes, headers: Mapping[str, str], seconds: float | None
    ) -> Any:
        """Raises TimeoutError, _MayPass, and PluginError for the last word."""
        import aiohttp

        try:
            async with (
                asyncio.timeout(seconds),
                session.post(url, data=data, headers=headers, proxy=self._proxy(url), allow_redirects=False) as answer,
            ):
                raw = await answer.read()
        except TimeoutError:
            raise  # some of aiohttp's are ClientErrors, too
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, ValueError) as error:
            raise PluginError(f"POST {url}: {error}") from None
        except aiohttp.ClientError as error:
            raise _MayPass(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        if 200 <= answer.status < 300:
            return _json(url, raw)
        said = f"{answer.status} {answer.reason}: {_text(raw)}".rstrip(": ")
        if answer.status != 429 and answer.status < 500:
            raise PluginError(f"POST {url}: {said}")
        raise _MayPass(said, pause=_retry_after(answer.headers))

    async def _session(self) -> aiohttp.ClientSession:
        import aiohttp

        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            for old in [old for old in self._sessions if old.is_closed()]:
                del self._sessions[old]  # shut down without `shutdown_asyncgens`; its sockets went with it
            client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=_KEEP_ALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(),  # ours is of the whole call, pauses included
            )
            ending = self._ends_with(loop, client)
            self._sessions[loop] = client, ending
            await anext(ending)
        return self._sessions[loop][0]

    async def _ends_with(
        self, loop: asyncio.AbstractEventLoop, client: aiohttp.ClientSession
    ) -> AsyncGenerator[None, None]:
        """The loop closes the generators it has started when it is shut down, and this one closes the client."""
        try:
            yield
        finally:
            self._sessions.pop(loop, None)
            await client.close()

    def _proxy(self, url: str) -> str | None:
        """The proxy for this address. aiohttp's own search takes two threads and a file for every request."""
        parts = urlsplit(url)
        address = parts.scheme, parts.netloc
        if address not in self._proxies:
            passed = not parts.hostname or proxy_bypass(parts.netloc.rpartition("@")[2])
            found = getproxies()
            self._proxies[address] = None if passed else found.get(parts.scheme) or found.get("all")
        return self._proxies[address]


class _MayPass(Exception):
    """An attempt that failed; `pause`: seconds that the service asks to wait."""

    def __init__(self, said: str, *, pause: float = 0.0) -> None:
        super().__init__(said)
        self.pause = pause


def _pause(state: RetryCallState) -> float:
    """Seconds before the next attempt: doubling, half of it random, and no less than the service asks for."""
    assert state.outcome is not None
    failed = state.outcome.exception()
    doubled: float = min(FIRST_DELAY_S * 2 ** (state.attempt_number - 1), LONGEST_DELAY_S)
    return max(failed.pause if isinstance(failed, _MayPass) else 0.0, doubled * random.uniform(0.5, 1.0))


def _json(url: str, raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise PluginError(f"POST {url}: answered no JSON: {_text(raw)!r}") from None


def _text(raw: bytes) -> str:
    return raw[: 4 * _SHOWN].decode("utf-8", "replace")[:_SHOWN]


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds the service asks to wait; a date counts as nothing."""
    text = headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0
