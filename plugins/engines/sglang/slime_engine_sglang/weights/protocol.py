"""What a server is and how it wants weights: asked before every update, because a restarted server may be another.

SGLang until 0.5.20 takes tensor and distributed updates at any time; from 0.5.21 on they must stand between
`/begin_weight_update` and `/end_weight_update`, a session, in which the server unpacks and repacks quantized weights.
A session that is not ended leaves a server that can never be updated again. `Round` keeps to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_core.errors import EngineError
from slime_engine_sglang.api.transport import MODEL_INFO, SERVER_INFO, Http, engine_error, expecting
from slime_engine_sglang.api.versions import version_number

_FIRST_WITH_SESSIONS = (0, 5, 21)
ASK_TIMEOUT_S = 30.0


class WeightsRefused(EngineError):
    """A server that lives does not take the weights: the fault may be theirs."""

    def __init__(self, message: str, *, untouched: bool) -> None:
        """`untouched`: nothing was written, so it can go on with the old ones."""
        super().__init__(message)
        self.status = 400
        self.untouched = untouched


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself."""

    software: str
    """"0.5.20"; "slime 1.2.3" for a server of ours; empty when it says nothing."""
    tp_size: int = 1
    pp_size: int = 1
    device: str = ""
    """"cpu", "cuda", ...; empty when it says nothing."""
    weight_version: str = ""

    @property
    def has_sessions(self) -> bool:
        """Tensor and distributed updates must stand in one; release candidates count as the release."""
        return (version_number(self.software) or (0, 0, 0)) >= _FIRST_WITH_SESSIONS

    @property
    def pause_modes(self) -> tuple[str, ...]:
        """What may become of requests in flight, best first.

        Until 0.5.20 SGLang cannot flush its cache while requests that gave up their rows wait, so those would go on
        with prefixes of the old weights.
        """
        retract = self.has_sessions or not self.is_sglang
        return ("retract", "abort", "in_place") if retract else ("abort", "in_place")

    @property
    def is_sglang(self) -> bool:
        """Whether tensor and distributed updates exist there."""
        return version_number(self.software) is not None


async def server_facts(http: Http, url: str, *, timeout: float = ASK_TIMEOUT_S) -> ServerFacts:
    """Ask the server. Raises EngineError."""
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
    )


async def served_version(http: Http, url: str, *, timeout: float = ASK_TIMEOUT_S) -> str:
    """The weight version that the server reports. Raises EngineError."""
    info = (await http.send("GET", url, MODEL_INFO, timeout=timeout)).object()
    if "weight_version" not in info:
        raise EngineError(f"{url}: the server does not say which weight version it serves")
    return str(info["weight_version"])


async def call(http: Http, url: str, path: str, body: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
    """A POST that is executed at most once. Raises EngineError also for an answer that says `success: false`."""
    try:
        async with asyncio.timeout(timeout):
            answer = (await http.send("POST", url, path, body, timeout=timeout + 1.0, repeat=False)).object()
    except TimeoutError:
        raise engine_error(url + path, f"no answer within {timeout:g} s (--update-weight-timeout)") from None
    if answer.get("success") is False:
        raise engine_error(url + path, str(answer.get("message")), 400)
    return answer
