"""Send calls to SGLang's servers and routers through a connection pool; return the answer or raise an `EngineError`.

`client`, `control`, `router` and the weight modules send through `Http`. A call is repeated only if a second execution
does no harm, which the caller declares (`repeat`). If the connection could not be opened, nothing was executed, so the
call is always repeated.

    repeated within the call's deadline   connection errors, 408, 429, 500, 502, 503, 504
    never repeated                        every other status; a call that is out of time
    `repeat=False` (weight updates)       only refused connections, 429 and 503 are repeated: nothing was executed
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import orjson
import tenacity

from slime_core.errors import ConfigError, EngineError
from slime_engine_http.api.versions import tested

if TYPE_CHECKING:
    import aiohttp

RETRY_STATUS = frozenset({408, 429, 500, 502, 503, 504})
NOTHING_DONE = frozenset({429, 503})
"""Statuses that promise that the call was not executed."""
SERVER_INFO, MODEL_INFO = "/server_info", "/model_info"
ATTEMPTS = 4
FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 5.0
CONNECT_TIMEOUT_S = 30.0
"""Seconds to connect; without a limit the kernel would wait for minutes for a host that is switched off."""
_KEEP_ALIVE_S = 4.0
"""Seconds to keep an idle connection; shorter than the five seconds after which slime's servers (uvicorn) close it."""


class Answer(NamedTuple):
    """A response that has been read completely."""

    url: str
    status: int
    body: bytes
    headers: Mapping[str, str]

    def json(self) -> Any:
        """Return the parsed body. Raises EngineError if the body is not JSON."""
        try:
            return orjson.loads(self.body)
        except ValueError:
            shown = self.body[:200].decode(errors="replace")
            raise engine_error(self.url, f"not an answer of SGLang's API: {shown!r}", self.status) from None

    def object(self) -> dict[str, Any]:
        """Return the JSON object; {} if the body is not a JSON object, for example an empty 200."""
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        value = self.json() if kind == "application/json" else {}
        return value if isinstance(value, dict) else {}


def engine_error(url: str, message: str, status: int | None = None, *, reached: bool = True) -> EngineError:
    """Return an EngineError with the URL, the status, and whether a server was reached."""
    error = EngineError(f"{url.removeprefix('http://')}: {message}")
    error.url, error.status, error.reached = url, status, reached
    return error


@contextmanager
def expecting(what: str, url: str, answer: object, software: str = "") -> Iterator[None]:
    """Raise an EngineError if the code inside fails because an answer does not have the expected content.

    Args:
        what: Description of the expected content.
        url: URL with the path of the call.
        answer: The answer, unchanged.
        software: The server's version, if known.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        who = f"SGLang {software}" if software else "SGLang"
        raise engine_error(
            url, f"{who} answers otherwise than expected, {what}: {str(answer)[:200]} ({error!r}); {tested()}", 200
        ) from error


def backoff(attempt: int) -> float:
    """Return the seconds to wait before attempt number `attempt` (the first is 0): doubling, half of it random."""
    delay = min(FIRST_DELAY_S * 2 ** (attempt - 1), LONGEST_DELAY_S)
    return float(delay * random.uniform(0.5, 1.0))


class Http:
    """An HTTP client: `await http.send("POST", url, "/generate", body)`. Open it before the first call; close it."""

    def __init__(self, *, timeout: float = 3600.0, proxy: str | None = None) -> None:
        """Set the default seconds of a call (`--rollout-timeout`) and the only proxy to use."""
        self.timeout = timeout
        self._proxy = proxy
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Open the connection pool; safe to call twice."""
        import aiohttp

        if self._session is None:
            # A request holds a connection while it generates, so the callers limit requests, not the pool.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Authorization": f"Bearer {key}"} if (key := os.environ.get("SLIME_API_KEY")) else None,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            )

    async def __aenter__(self) -> Http:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection pool; safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def session(self) -> aiohttp.ClientSession:
        """Return the session of aiohttp. Raises EngineError before `open`."""
        if self._session is None:
            raise EngineError("the engine is not running; await start() first")
        return self._session

    async def send(
        self,
        method: str,
        url: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
        accept: Collection[int] = (),
        attempts: int | None = None,
        repeat: bool = True,
    ) -> Answer:
        """Send a call; repeat it by the rules of the module until the attempts or the time are used up.

        Args:
            method: "GET", "POST", ...
            url: URL of the server, without a slash at the end.
            path: Path that begins with a slash.
            body: JSON object.
            timeout: Seconds for all attempts and the pauses between them; by default the `Http`'s.
            headers: Additional headers.
            accept: Statuses besides 200 and 202 that are answers, not failures.
            attempts: Maximum number of attempts; by default `ATTEMPTS`.
            repeat: False if a second execution would do harm.

        Raises:
            EngineError: The call failed. The error has `url` and, if there was an answer, `status`.
        """
        limit = self.timeout if timeout is None else timeout
        until = time.monotonic() + limit
        data, given = encoded(body, headers)
        reached = False

        async def attempt() -> Answer:
            nonlocal reached
            try:
                return await self.once(method, url + path, data, given, accept)
            except EngineError as error:
                reached = error.reached = reached or error.reached
                raise

        def again(error: BaseException) -> bool:
            if not isinstance(error, EngineError) or error.url is None:
                return False
            if error.status is None:
                return repeat or not reached
            return error.status in (RETRY_STATUS if repeat else NOTHING_DONE)

        tries = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(attempts or ATTEMPTS)
            | tenacity.stop_before_delay(until - time.monotonic()),
            wait=lambda state: backoff(state.attempt_number),
            retry=tenacity.retry_if_exception(again),
            reraise=True,
        )
        try:
            async with asyncio.timeout_at(until):
                return await tries(attempt)
        except TimeoutError as error:
            raise engine_error(url + path, f"no answer within {limit:g} s{self._flag(limit)}") from error

    async def once(
        self, method: str, url: str, data: bytes | None, headers: Mapping[str, str], accept: Collection[int] = ()
    ) -> Answer:
        """Send a call once, without a deadline: the caller's `asyncio.timeout` is cheaper than aiohttp's.

        Args:
            method: "GET", "POST", ...
            url: URL with the path.
            data: Body returned by `encoded`.
            headers: Headers returned by `encoded`.
            accept: Statuses besides 200 and 202 that are answers, not failures.

        Raises:
            EngineError: The call failed. The error has no `url` if the call itself is invalid for every server.
        """
        import aiohttp

        try:
            async with self.session().request(
                method, url, data=data, headers=headers, proxy=self._proxy, allow_redirects=False
            ) as response:
                body = await response.read()
                status = response.status
                if status == 200 or status == 202 or status in accept:
                    return Answer(url, status, body, response.headers)
        except (aiohttp.ClientError, ValueError) as error:
            raise _failed(url, error) from error
        raise engine_error(url, refusal(status, body), status)

    @asynccontextmanager
    async def events(
        self, url: str, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a call once and yield a response whose body `lines` reads; the time-out applies between two pieces.

        Raises:
            EngineError: The server refused, or the connection broke, also while the block runs.
        """
        import aiohttp

        data, given = encoded(body, headers)
        begun = False
        try:
            async with self.session().post(
                url + path, data=data, headers=given, proxy=self._proxy, allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_read=self.timeout, sock_connect=CONNECT_TIMEOUT_S),
            ) as response:  # fmt: skip
                if response.status != 200:
                    raise engine_error(url + path, refusal(response.status, await response.read()), response.status)
                begun = True
                yield response
        except aiohttp.ConnectionTimeoutError as error:
            raise _failed(url + path, error) from error
        except TimeoutError as error:
            raise engine_error(url + path, f"nothing came within {self.timeout:g} s (--rollout-timeout)") from error
        except aiohttp.ClientError as error:
            if not begun:
                raise _failed(url + path, error) from error
            # The server that answered may still be alive: the broken connection may be one behind a router.
            raise engine_error(url + path, f"stream broke: {type(error).__name__}: {error}", 200) from error

    def _flag(self, limit: float) -> str:
        return " (--rollout-timeout)" if limit == self.timeout else ""


def encoded(body: Mapping[str, Any] | None, headers: Mapping[str, str] | None) -> tuple[bytes | None, dict[str, str]]:
    """Return body and headers to send. Raises EngineError if the body cannot be written as JSON."""
    given = dict(headers) if headers else {}
    if body is None:
        return None, given
    given["Content-Type"] = "application/json"
    try:
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), given
    except TypeError as error:
        raise EngineError(f"not to be sent as JSON: {error}") from error


def _failed(url: str, error: Exception) -> EngineError:
    """Return the error of a call without an answer."""
    import aiohttp

    if isinstance(error, aiohttp.InvalidURL):
        return engine_error(url, f"not a URL: {error}")
    if isinstance(error, ValueError):  # such as a header with a line break
        return EngineError(f"{url}: not to be sent: {error}")
    reached = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    return engine_error(url, f"{type(error).__name__}: {error}".rstrip(": "), reached=reached)


async def lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a body; lines may have any length."""
    rest = b""
    async for data in content.iter_any():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest


def refusal(status: int, raw: bytes) -> str:
    """Return the status and the error message of a refused call."""
    try:
        body = orjson.loads(raw)
    except ValueError:
        return f"status {status}: {raw[:200].decode(errors='replace')}"
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return f"status {status}: {message}"


def address_towards(host: str | None) -> str:
    """Return the address of this machine on the route to `host`. Raises OSError."""
    family, kind, proto, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)  # sends nothing: the kernel only chooses the route
        return str(probe.getsockname()[0])


def server_url(address: str, flag: str = "--rollout-external-engine-addrs") -> str:
    """Return HOST:PORT or a URL as a URL. Raises ConfigError, which names the flag."""
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(url)
        fits = bool(parts.hostname and parts.port) and parts.path in ("", "/") and not parts.query
    except ValueError:
        fits = False
    if not fits or parts.scheme not in ("http", "https"):
        raise ConfigError(f"{flag} {address!r}: expected HOST:PORT or http://HOST:PORT, the HOST of IPv6 in brackets")
    return url.rstrip("/")
