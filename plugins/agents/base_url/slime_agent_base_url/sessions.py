"""One agent's run as the endpoints see it: what it may do, what it has sampled, and the samples that it becomes.

A harness opens a session in `server.AgentServer`, gives its key to the program as the API key, and ends it with
`finish_session`. A session outlives its program's mistakes. Requests that fail are answered and counted; what was
sampled before them stays, and whether the run failed is the harness's to say.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from slime_command_serve.front.wanted import Conversations
from slime_command_serve.http.errors import Refused

from slime_agent_base_url.tree import MessageTree
from slime_core.types import Sample

FORK_THRESHOLD = 1024
"""THUDM/slime's `fork_threshold_tokens`."""


def session_key(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """The key of a request, whichever API it is of: that of the first place which has one.

    The bearer token, `X-Api-Key`, `X-Session-ID`, `metadata.session_id`, `metadata.user_id`, `user`. "EMPTY" is what
    clients send that have no key.
    """
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    keys = token.strip() if scheme.lower() == "bearer" else "", headers.get("X-Api-Key")
    metadata = body.get("metadata")
    named = metadata if isinstance(metadata, Mapping) else {}
    others = headers.get("X-Session-ID"), named.get("session_id"), named.get("user_id"), body.get("user")
    return next((str(key) for key in (*(k for k in keys if k != "EMPTY"), *others) if key), None)


@dataclass(frozen=True)
class SessionLimits:
    """What a session may do."""

    max_turns: int = 50
    """Answers; a request for one more gets status 429."""
    max_response_tokens: int | None = None
    """Tokens after the first prompt of a conversation, answers and everything between them; then answers end with
    "length". Another conversation of the session (a sub-agent, a compacted context) has as many again."""
    max_context_tokens: int | None = None
    """Prompt and answer together."""
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
    """The sample that it was opened for; its prompt is context for the program, not necessarily for the model."""
    sampling_params: dict[str, Any]
    limits: SessionLimits = field(default_factory=SessionLimits)
    evaluation: bool = False
    closed: bool = False
    """No more requests: 503."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """The engine ended a request of it for the framework: the run is over and will be repeated."""
    truncated: bool = False
    """An answer ended because tokens or turns ran out."""
    warnings: Counter[str] = field(default_factory=Counter)
    """What requests asked for without effect -> how often."""
    errors: list[str] = field(default_factory=list)
    """Answers other than 200, the newest last."""
    counts: Counter[str] = field(default_factory=Counter)
    """`requests`, `disconnected`, `over_turn_cap`, ..."""
    conversations: Conversations = field(default_factory=Conversations)
    """Responses API: what responses ended."""
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    """Requests that are being answered."""
    rids: set[str] = field(default_factory=set)
    """Names of its requests in the engine."""

    def __post_init__(self) -> None:
        self.tree = MessageTree(rewrite_threshold=self.limits.fork_threshold_tokens)
        self.turns = 0
        """Answers delivered or on their way."""
        self.engine_seconds = 0.0
        """Time in which at least one of its requests was in the engine."""
        self._busy_since = 0.0

    @contextmanager
    def in_engine(self, rid: str) -> Iterator[None]:
        """A request is in the engine while inside."""
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
        """One more answer. Raises Refused with 503 or 429."""
        if self.closed or self.aborted.is_set():
            raise Refused(503, "this session is closed; its run has ended")
        if self.turns >= self.limits.max_turns:
            self.truncated = True
            self.counts["over_turn_cap"] += 1
            raise Refused(429, f"this session has had its {self.limits.max_turns} turns (max_turns)")
        self.turns += 1

    def give_back(self) -> None:
        """An answer that `admit` counted did not come about."""
        self.turns -= 1

    def warn(self, what: str) -> None:
        """Remember that something was asked for and had no effect."""
        self.warnings[what] += 1

    def room(self, prompt_length: int, first_prompt_length: int) -> int:
        """Tokens that the next answer may have; 0 or less: the budget is used up."""
        rooms = [int(self.sampling_params.get("max_new_tokens") or 1 << 40)]
        if self.limits.max_response_tokens is not None:
            rooms.append(self.limits.max_response_tokens - (prompt_length - first_prompt_length))
        if self.limits.max_context_tokens is not None:
            rooms.append(self.limits.max_context_tokens - prompt_length)
        return min(rooms)

    def summary(self) -> Mapping[str, Any]:
        """Plain values for `Sample.metadata`."""
        return {
            "turns": self.turns,
            "rewritten": self.tree.rewritten,
            **({"warnings": dict(self.warnings)} if self.warnings else {}),
            **({"errors": self.errors[-20:]} if self.errors else {}),
            **dict(self.counts),
        }
