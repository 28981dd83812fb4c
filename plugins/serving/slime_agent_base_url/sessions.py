"""The state of an agent's run at the endpoints: its limits, its sampled turns, and the resulting samples.

A harness opens a session in `server.AgentServer`, passes its key to the program as the API key, and ends it with
`finish_session`. A failed request does not end a session: the request gets an error response and is counted, and the
turns sampled before it are kept. The harness decides whether the run failed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from slime_serving.front.wanted import Conversations
from slime_serving.http.errors import Refused

from slime_agent_base_url.tree import MessageTree
from slime_core.sample import Sample

FORK_THRESHOLD = 1024
"""Default of THUDM/slime's `fork_threshold_tokens`."""


def session_key(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """Return the session key of a request of any API, from the first of these places that has a key.

    The bearer token, `X-Api-Key`, `X-Session-ID`, `metadata.session_id`, `metadata.user_id`, `user`. "EMPTY" is
    ignored: clients without a key send it.
    """
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    keys = token.strip() if scheme.lower() == "bearer" else "", headers.get("X-Api-Key")
    metadata = body.get("metadata")
    named = metadata if isinstance(metadata, Mapping) else {}
    others = headers.get("X-Session-ID"), named.get("session_id"), named.get("user_id"), body.get("user")
    return next((str(key) for key in (*(k for k in keys if k != "EMPTY"), *others) if key), None)


@dataclass(frozen=True)
class SessionLimits:
    """Limits of a session."""

    max_turns: int = 50
    """Maximum number of answers; a further request gets status 429."""
    max_response_tokens: int | None = None
    """Maximum number of tokens after the first prompt of a conversation, including the text between answers; at the
    limit, answers end with "length". Each conversation of the session (a sub-agent, a compacted context) has this
    limit."""
    max_context_tokens: int | None = None
    """Maximum number of tokens of prompt and answer together."""
    fork_threshold_tokens: int = FORK_THRESHOLD
    """An answer of fewer tokens that the client rewrote is dropped from its sequence; a longer one makes a fork."""
    client_sampling: bool = False
    """Take `temperature` and `top_p` from requests, in evaluation only: the trainer divides its logits by the run's."""


@dataclass(eq=False)
class Session:
    """State of one session. Made by `AgentServer.open_session`."""

    key: str
    """The program's API key."""
    base: Sample
    """Sample for which the session was opened; its prompt is for the program, not necessarily for the model."""
    sampling_params: dict[str, Any]
    limits: SessionLimits = field(default_factory=SessionLimits)
    evaluation: bool = False
    closed: bool = False
    """True if the session accepts no more requests (status 503)."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the engine aborted a request for the framework: the run has ended and will be repeated."""
    truncated: bool = False
    """True if an answer ended because tokens or turns ran out."""
    warnings: Counter[str] = field(default_factory=Counter)
    """Request option that had no effect -> number of requests."""
    errors: list[str] = field(default_factory=list)
    """Error responses (status other than 200), newest last."""
    counts: Counter[str] = field(default_factory=Counter)
    """Event -> count: `requests`, `disconnected`, `over_turn_cap`, ..."""
    conversations: Conversations = field(default_factory=Conversations)
    """Conversations of ended responses (Responses API)."""
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    """Tasks of the requests in progress."""
    rids: set[str] = field(default_factory=set)
    """Ids of the session's requests in the engine."""

    def __post_init__(self) -> None:
        self.tree = MessageTree(rewrite_threshold=self.limits.fork_threshold_tokens)
        self.turns = 0
        """Number of answers delivered or in progress."""
        self.engine_seconds = 0.0
        """Seconds in which at least one request of the session was in the engine."""
        self._busy_since = 0.0

    @contextmanager
    def in_engine(self, rid: str) -> Iterator[None]:
        """Count a request as in the engine while inside the context."""
        if not self.rids:
            self._busy_since = time.monotonic()
        self.rids.add(rid)
        try:
            yield
        finally:
            self.rids.discard(rid)
            if not self.rids:
                self.engine_seconds += time.monotonic() - self._busy_since

    def admit(self) -> None:
        """Count one more answer. Raises Refused with status 503 or 429."""
        if self.closed or self.aborted.is_set():
            raise Refused(503, "this session is closed; its run has ended")
        if self.turns >= self.limits.max_turns:
            self.truncated = True
            self.counts["over_turn_cap"] += 1
            raise Refused(429, f"this session has had its {self.limits.max_turns} turns (max_turns)")
        self.turns += 1

    def give_back(self) -> None:
        """Uncount an answer that `admit` counted and that was not produced."""
        self.turns -= 1

    def warn(self, what: str) -> None:
        """Count a request option that had no effect."""
        self.warnings[what] += 1

    def room(self, prompt_length: int, first_prompt_length: int) -> int:
        """Return the maximum number of tokens of the next answer; 0 or less if the budget is used up."""
        rooms = [int(self.sampling_params.get("max_new_tokens") or 1 << 40)]
        if self.limits.max_response_tokens is not None:
            rooms.append(self.limits.max_response_tokens - (prompt_length - first_prompt_length))
        if self.limits.max_context_tokens is not None:
            rooms.append(self.limits.max_context_tokens - prompt_length)
        return min(rooms)

    def summary(self) -> Mapping[str, Any]:
        """Return plain values for `Sample.metadata`."""
        return {
            "turns": self.turns,
            "rewritten": self.tree.rewritten,
            **({"warnings": dict(self.warnings)} if self.warnings else {}),
            **({"errors": self.errors[-20:]} if self.errors else {}),
            **dict(self.counts),
        }
