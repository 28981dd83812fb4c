"""One connection pool to SGLang's servers and routers: a call in, its answer or one `EngineError` out.

`client`, `control`, `router` and the weight modules send through `Http`. A call may be tried again only where a second
execution does no harm, which the caller says (`repeat`); a connection that could not be opened has executed nothing and
is always tried again.

    tried again, within the call's deadline   connection errors, 408, 429, 500, 502, 503, 504
    never tried again                         every other status; a call that is out of time
    `repeat=False` (weight updates)           only connections that were refused, and 429 and 503, which did nothing
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
from slime_engine_sglang.api.versions import tested

if TYPE_CHECKING:
    import aiohttp

RETRY_STATUS = frozenset({408, 429, 500, 502, 503, 504})
NOTHING_DONE = frozenset({429, 503})
"""Refusals that promise that the call was not executed."""
SERVER_INFO, MODEL_INFO = "/server_info", "/model_info"
ATTEMPTS = 4
FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 5.0
CONNECT_TIMEOUT_S = 30.0
"""A host that is switched off refuses nothing; the kernel would wait for minutes."""
_KEEP_ALIVE_S = 4.0
"""Servers of ours, as uvicorn does, hang up after five idle seconds; a connection they are about to close is no use."""


class Answer(NamedTuple):
    """A response, read to its end."""

    url: str
    status: int
    body: bytes
    headers: Mapping[str, str]

    def json(self) -> Any:
        """Raises EngineError when the body is no JSON."""
        try:
            return orjson.loads(self.body)
        except ValueError:
            shown = self.body[:200].decode(errors="replace")
            raise engine_error(self.url, f"not an answer of SGLang's API: {shown!r}", self.status) from None

    def object(self) -> dict[str, Any]:
        """The JSON object; {} where the answer is none, as that of an endpoint that says nothing but 200."""
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        value = self.json() if kind == "application/json" else {}
        return value if isinstance(value, dict) else {}


def engine_error(url: str, message: str, status: int | None = None, *, reached: bool = True) -> EngineError:
    """An EngineError that carries where, with which status, and whether anybody was reached."""
    error = EngineError(f"{url.removeprefix('http://')}: {message}")
    error.url, error.status, error.reached = url, status, reached
    return error


@contextmanager
def expecting(what: str, url: str, answer: object, software: str = "") -> Iterator[None]:
    """Raise one EngineError where the code inside does not find in an answer what it reads.

    Args:
        what: What is expected, in words.
        url: Whose answer it is, with the path.
        answer: As it came.
        software: The server's version, where it is known.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        who = f"SGLang {software}" if software else "SGLang"
        raise engine_error(
            url, f"{who} answers otherwise than expected, {what}: {str(answer)[:200]} ({error!r}); {tested()}", 200
        ) from error


def backoff(attempt: int) -> float:
    """Seconds before attempt number `attempt` (the first is 0): doubling, half of it random."""
    delay = min(FIRST_DELAY_S * 2 ** (attempt - 1), LONGEST_DELAY_S)
    return float(delay * random.uniform(0.5, 1.0))


class Http:
    """`await http.send("POST", url, "/generate", body)`; open before the first call, close after the last."""

    def __init__(self, *, timeout: float = 3600.0, proxy: str | None = None) -> None:
        """`timeout`: seconds of a call that names none (`--rollout-timeout`). No proxy but this one is used."""
        self.timeout = timeout
        self._proxy = proxy
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Safe to call twice."""
        import aiohttp

        if self._session is None:
            # One request holds one connection for as long as it generates, so limits are ours, not the pool's.
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
        """Safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def session(self) -> aiohttp.ClientSession:
        """Raises EngineError before `open`."""
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
        """One call, tried again as the module says until the attempts or the time are used up.

        Args:
            method: "GET", "POST", ...
            url: Of the server, without a slash at the end.
            path: Begins with a slash.
            body: JSON object.
            timeout: Seconds for all attempts and the pauses between them; by default the `Http`'s.
            headers: Added to the request.
            accept: Statuses beside 200 and 202 that are answers, not failures.
            attempts: At most so many; by default `ATTEMPTS`.
            repeat: False: a second execution would do harm.

        Raises:
            EngineError: With `url` and, where there was an answer, `status`.
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
        """One attempt, without a deadline: the caller's `asyncio.timeout` is cheaper than the library's own.

        Args:
            method: "GET", "POST", ...
            url: With the path.
            data: Body, and
            headers: as `encoded` made them.
            accept: As for `send`.

        Raises:
            EngineError: `url` is None where the call itself is wrong, so that no other server would do it.
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
        """A response whose body is read by `lines`; the time-out is that between two pieces of it. Never repeated.

        Raises:
            EngineError: The server refused, or the connection broke, inside the block too.
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
            # Whoever answered is still there as far as anybody knows: this may be the server behind it.
            raise engine_error(url + path, f"stream broke: {type(error).__name__}: {error}", 200) from error

    def _flag(self, limit: float) -> str:
        return " (--rollout-timeout)" if limit == self.timeout else ""


def encoded(body: Mapping[str, Any] | None, headers: Mapping[str, str] | None) -> tuple[bytes | None, dict[str, str]]:
    """Body and headers as they are sent. Raises EngineError for a body that JSON cannot hold."""
    given = dict(headers) if headers else {}
    if body is None:
        return None, given
    given["Content-Type"] = "application/json"
    try:
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), given
    except TypeError as error:
        raise EngineError(f"not to be sent as JSON: {error}") from error


def _failed(url: str, error: Exception) -> EngineError:
    """A call that got no answer."""
    import aiohttp

    if isinstance(error, aiohttp.InvalidURL):
        return engine_error(url, f"not a URL: {error}")
    if isinstance(error, ValueError):  # such as a header with a line break
        return EngineError(f"{url}: not to be sent: {error}")
    reached = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    return engine_error(url, f"{type(error).__name__}: {error}".rstrip(": "), reached=reached)


async def lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length."""
    rest = b""
    async for data in content.iter_any():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest


def refusal(status: int, raw: bytes) -> str:
    """What a refusal says."""
    try:
        body = orjson.loads(raw)
    except ValueError:
        return f"status {status}: {raw[:200].decode(errors='replace')}"
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return f"status {status}: {message}"


def address_towards(host: str | None) -> str:
    """This machine's address on the way to another. Raises OSError."""
    family, kind, proto, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)  # sends nothing: the kernel only looks for the way
        return str(probe.getsockname()[0])


def server_url(address: str, flag: str = "--rollout-external-engine-addrs") -> str:
    """HOST:PORT or a URL as a URL. Raises ConfigError, which names the flag."""
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(url)
        fits = bool(parts.hostname and parts.port) and parts.path in ("", "/") and not parts.query
    except ValueError:
        fits = False
    if not fits or parts.scheme not in ("http", "https"):
        raise ConfigError(f"{flag} {address!r}: expected HOST:PORT or http://HOST:PORT, the HOST of IPv6 in brackets")
    return url.rstrip("/")
