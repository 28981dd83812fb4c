"""Access control and size limits: the ASGI layer before every route.

    Host, Origin     this machine or an allowed name, so a web page can neither POST here nor rename 127.0.0.1
    key              required for every request but GET, if set; a server that other machines reach should have a key
    Content-Type     JSON if there is a body, which a form or a `fetch` without preflight cannot send
    body             limited in size, and must arrive within a deadline

GET changes nothing, so it needs no key. A server without a key that other machines reach (`SLIME_HOST_IP`) accepts only
generation requests from them.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slime_serving.http.errors import Refused

KEY_VARIABLE = "SLIME_API_KEY"
"""Environment variable with the key, for servers and for slime's clients."""
LARGEST_BODY = 16 << 20
BODY_S = 60.0
"""Seconds for a body to arrive."""
_THROWN_AWAY = 4 * LARGEST_BODY
_SAFE = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True)
class Access:
    """Access rules of a server."""

    api_key: str | None = None
    """Key required for every request but GET: the bearer token or `X-Api-Key`."""
    hosts: frozenset[str] = frozenset()
    """Names allowed in Host and Origin besides this machine's own; "*" allows any."""
    generates_only: bool = False
    """Whether to refuse requests that change the server, since it has no key: POST except `/generate` and `/v1/`."""


def is_local(host: str) -> bool:
    """Return whether a host name or an address can only be this machine's loopback."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Guard:
    """An ASGI application in front of another."""

    def __init__(
        self, app: ASGIApp, access: Access, refuse: Callable[[str, Refused], ASGIApp], largest_body: int = LARGEST_BODY
    ) -> None:
        """Wrap `app`; `refuse` returns the application that answers a refused path."""
        self.app, self.access, self.refuse, self.largest_body = app, access, refuse, largest_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, then pass it to `app` or answer with a refusal."""
        if scope["type"] in ("lifespan", "websocket"):
            return await self.app(scope, receive, send)
        headers, reads = Headers(scope=scope), scope["method"] not in _SAFE
        receive = request = _Request(receive)
        try:
            self._check_origin(headers)
            if reads:
                self._check_key(scope["path"], headers)
                receive = _once(await self._body(headers, receive), receive)
        except Refused as refusal:
            if reads and refusal.status != 408:
                await _throw_away(request)
            return await self.refuse(scope["path"], refusal)(scope, receive, send)
        await self.app(scope, receive, send)

    def _check_origin(self, headers: Headers) -> None:
        names = {"Host": _name(f"//{headers.get('host', '')}"), "Origin": _name(headers.get("origin", ""))}
        for header, name in names.items():
            if name is None or "*" in self.access.hosts or name in self.access.hosts or is_local(name):
                continue
            raise Refused(403, f"{header} is {name[:80]!r}; allowed: this machine's, and those of --allowed-hosts")

    def _check_key(self, path: str, headers: Headers) -> None:
        if self.access.generates_only and not (path == "/generate" or path.startswith("/v1/")):
            raise Refused(403, f"POST {path[:80]} needs a key; start the server with one (SLIME_API_KEY)")
        if self.access.api_key is None:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(), self.access.api_key.encode()):
            raise Refused(
                401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY` (SLIME_API_KEY)"
            )

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.largest_body:
            raise Refused(413, f"the body has {length[:20]} bytes; allowed: {self.largest_body}")
        pieces, size, more = [], 0, True
        try:
            async with asyncio.timeout(BODY_S):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(400, "the connection was closed before the body had arrived")
                    pieces.append(message.get("body", b""))
                    size, more = size + len(pieces[-1]), message.get("more_body", False)
                    if size > self.largest_body:
                        raise Refused(413, f"the body has more than the {self.largest_body} bytes that are allowed")
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {BODY_S:.0f} s") from None
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if size and kind != "application/json":
            raise Refused(415, f"Content-Type is {kind[:80]!r}; allowed: application/json")
        return b"".join(pieces)


class _Request:
    """The messages of a request; `ended` is True after its body, when only the end of the connection can follow."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self.ended = receive, False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.ended = self.ended or not message.get("more_body", False)
        return message


async def _throw_away(request: _Request) -> None:
    """Read the rest of a body, so that the client reads the answer; limited in time and bytes."""
    left = _THROWN_AWAY
    with suppress(TimeoutError):
        async with asyncio.timeout(BODY_S / 6):
            while left > 0 and not request.ended:
                left -= len((await request()).get("body", b""))


def _name(url: str) -> str | None:
    """Return the host in a URL, or None for an empty URL."""
    if not url or url == "//":
        return None
    try:
        return urlsplit(url).hostname or url
    except ValueError:
        return url


def _once(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that replays the body and then forwards further messages."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return left.pop() if left else await receive()

    return replay
