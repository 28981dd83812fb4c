"""Access control: a request needs the token and must come from a page of this server. Also limits what a page loads.

The token arrives once, in the address that the command prints, and afterwards as a cookie.
`slime_serving.http.guard` checks Host and Origin first.
"""

from __future__ import annotations

import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
RENDERED_POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'self'"
)
"""Content-Security-Policy for a renderer's output: it is displayed, but runs and loads nothing."""
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class TokenAccess:
    """ASGI middleware that checks the token."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self.app, self._token, self._cookie = app, token, f"slime_view_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._answer(scope)(scope, receive, with_headers)

    def _answer(self, scope: Scope) -> ASGIApp:
        if self._is_token(self._of_cookie(Headers(scope=scope).get("cookie", ""))):
            return self.app
        asked = parse_qsl(scope["query_string"].decode("latin-1"))
        if scope["path"] == "/" and self._is_token(dict(asked).get("token", "")):
            rest = urlencode([(name, value) for name, value in asked if name != "token"])
            # A relative address, and a cookie without a path: behind a proxy with a prefix the browser resolves both.
            response = RedirectResponse(f"./?{rest}" if rest else "./", status_code=303)
            response.set_cookie(self._cookie, self._token, path=None, httponly=True, samesite="lax")
            return response
        return PlainTextResponse("Open the address that `slime view` printed: it has the token.\n", status_code=401)

    def _of_cookie(self, header: str) -> str:
        try:
            found = SimpleCookie(header).get(self._cookie)
        except CookieError:
            return ""
        return found.value if found is not None else ""

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())
