"""A server's version and its protocol of weight updates, read before every update since a restarted server may differ.

SGLang until 0.5.20 takes tensor and distributed updates at any time. From 0.5.21 on they must be sent between
`/begin_weight_update` and `/end_weight_update`, in a session, in which the server unpacks and repacks quantized
weights. A server whose session is never ended cannot be updated again. `Round` follows this protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_core.errors import EngineError
from slime_engine_http.api.transport import MODEL_INFO, SERVER_INFO, Http, engine_error, expecting
from slime_engine_http.api.versions import version_number

_FIRST_WITH_SESSIONS = (0, 5, 21)
ASK_TIMEOUT_S = 30.0


class WeightsRefused(EngineError):
    """A live server refuses the weights; the weights may be at fault."""

    def __init__(self, message: str, *, untouched: bool) -> None:
        """Set `untouched` if nothing was written, so the server can continue with the old weights."""
        super().__init__(message)
        self.status = 400
        self.untouched = untouched


@dataclass(frozen=True)
class ServerFacts:
    """Facts that a server reports about itself."""

    software: str
    """Version: "0.5.20", or "slime 1.2.3" for slime's own server; empty if not reported."""
    tp_size: int = 1
    pp_size: int = 1
    device: str = ""
    """Device: "cpu", "cuda", ...; empty if not reported."""
    weight_version: str = ""
    file_sessions: bool = False
    """Whether every update needs a session, those from files too, whose end sets the version (vLLM)."""

    @property
    def has_sessions(self) -> bool:
        """Whether tensor and distributed updates need a session; release candidates count as the release."""
        return self.file_sessions or (version_number(self.software) or (0, 0, 0)) >= _FIRST_WITH_SESSIONS

    @property
    def pause_modes(self) -> tuple[str, ...]:
        """Supported ways to treat requests in flight, best first.

        Until 0.5.20 SGLang cannot flush its cache while retracted requests wait, so such requests would continue with
        prefixes of the old weights.
        """
        retract = self.has_sessions or self.is_atomic
        return ("retract", "abort", "in_place") if retract else ("abort", "in_place")

    @property
    def is_atomic(self) -> bool:
        """Whether the server updates in one call, from files only, and flushes itself, as slime's servers do."""
        return version_number(self.software) is None


async def server_facts(http: Http, url: str, *, timeout: float = ASK_TIMEOUT_S) -> ServerFacts:
    """Request the facts from the server. Raises EngineError."""
    info = (await http.send("GET", url, SERVER_INFO, timeout=timeout)).object()
    software = str(info.get("version") or "")
    with expecting("tp_size and pp_size as numbers", url + SERVER_INFO, info, software):
        tp, pp = int(info.get("tp_size") or 1), int(info.get("pp_size") or 1)
    return ServerFacts(
        software=software,
        tp_size=tp,
        pp_size=pp,
        device=str(info.get("device") or ""),
        weight_version=str(info.get("weight_version") or ""),
        file_sessions=bool(info.get("file_sessions")),
    )


async def served_version(http: Http, url: str, *, timeout: float = ASK_TIMEOUT_S) -> str:
    """Return the weight version that the server reports. Raises EngineError."""
    info = (await http.send("GET", url, MODEL_INFO, timeout=timeout)).object()
    if "weight_version" not in info:
        raise EngineError(f"{url}: the server does not say which weight version it serves")
    return str(info["weight_version"])


async def call(http: Http, url: str, path: str, body: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
    """Send a POST that is executed at most once. Raises EngineError, also for a response with `success: false`."""
    try:
        async with asyncio.timeout(timeout):
            answer = (await http.send("POST", url, path, body, timeout=timeout + 1.0, repeat=False)).object()
    except TimeoutError:
        raise engine_error(url + path, f"no answer within {timeout:g} s (--update-weight-timeout)") from None
    if answer.get("success") is False:
        raise engine_error(url + path, str(answer.get("message")), 400)
    return answer
