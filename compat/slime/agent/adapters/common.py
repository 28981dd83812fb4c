"""`slime.agent.adapters.common.BaseAdapter`: endpoints for agents, and samples from their conversations.

The adapter is `slime_agent_base_url.AgentServer` in front of the engine's HTTP address, run by the user in a thread::

    agent --HTTP--> adapter.app (run_app_in_thread) --HTTP--> sglang_url
    generate function: open_session -> the agent runs -> await finish_session     from any event loop

Every adapter has the endpoints of all three APIs. A request whose key has no open session gets 401 (THUDM/slime opens a
session). A client's temperature has no effect, since the trainer divides by the run's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import aiohttp
from aiohttp import web
from slime_agent_base_url.server import AgentServer, session_samples
from slime_agent_base_url.sessions import FORK_THRESHOLD, Session, SessionLimits
from slime_serving.http.guard import LARGEST_BODY

from slime import _missing
from slime.agent._asgi import aiohttp_application
from slime.agent.parsing import check_reasoning_parser, parser_of
from slime.agent.trajectory import TurnRecord
from slime.rollout._state import RouterEngine
from slime_core.errors import EngineError
from slime_core.sample import GenerationOutput, Sample, SampleStatus

logger = logging.getLogger(__name__)

T = TypeVar("T")
_SAMPLING = {
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
    "max_new_tokens": 4096,
}
"""Default sampling parameters of a session."""


def flatten_content(content: Any) -> str:
    """Return the text of a message's content, which may be None, text, or a list of Anthropic's or OpenAI's blocks.

    An image becomes "[image omitted]"; blocks are joined by newlines, and empty blocks are skipped.
    """
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "\n".join(filter(None, map(_text_of_block, content)))


def _text_of_block(block: Any) -> str:
    if not isinstance(block, dict):
        return str(block)
    kind = block.get("type")
    if kind in ("image", "image_url", "input_image"):
        return "[image omitted]"
    if kind != "tool_result" and (kind in ("text", "input_text", "output_text") or "content" not in block):
        return str(block.get("text") or "")
    return flatten_content(block.get("content"))


class _Engine(RouterEngine):
    """A client of the engine's HTTP address; an engine error becomes the agent's answer (502), the server survives."""

    async def generate(self, *args: Any, **kwargs: Any) -> GenerationOutput:
        try:
            return await super().generate(*args, **kwargs)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"the engine at {self.url}: {error}") from error


class BaseAdapter:
    """A server for many sessions.

    Args:
        tokenizer: Tokenizer of the model, with its chat template.
        sglang_url: `http://host:port` of the engine or its router.
        tool_parser: Family that writes the tool calls (`slime plugins list --kind tool_parsers`, or SGLang's name);
            None: the parser that claims the chat template, else `hermes`.
        reasoning_parser: SGLang's name of a family that reasons between <think> tags, which are always removed.
        max_turns_per_sid: Largest number of answers of a session; further requests get 429. None: no limit.
        fork_threshold_tokens: See `slime_agent_base_url.SessionLimits`.

    Raises:
        ValueError: A parser of another family.
    """

    def __init__(
        self,
        *,
        tokenizer: Any,
        sglang_url: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
    ) -> None:
        check_reasoning_parser(reasoning_parser)
        engine: Any = _Engine(url=sglang_url.rstrip("/"))
        self.tokenizer = tokenizer
        self.sglang_url = sglang_url.rstrip("/")
        self.max_turns_per_sid = max_turns_per_sid
        self.fork_threshold_tokens = FORK_THRESHOLD if fork_threshold_tokens is None else fork_threshold_tokens
        self.server = AgentServer(engine, tokenizer, parser=parser_of(tool_parser, tokenizer))
        self.app: web.Application = aiohttp_application(self.server.application(), 2 * LARGEST_BODY)
        """Application for `slime.agent.aiohttp_threaded.run_app_in_thread`, or for aiohttp in any other way."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.app.on_startup.append(self._started)

    async def _started(self, app: web.Application) -> None:
        self._loop = asyncio.get_running_loop()

    def open_session(
        self, sid: str, *, sampling_defaults: Mapping[str, Any] | None = None, max_context_tokens: int = 0
    ) -> None:
        """Accept requests with the key `sid`. Raises ValueError if the session is open already.

        Args:
            sid: The agent's API key.
            sampling_defaults: The run's sampling parameters.
            max_context_tokens: Limit of prompt plus answer; answers at the limit end with "length". 0: no limit.
        """
        limits = SessionLimits(
            max_turns=1 << 40 if self.max_turns_per_sid is None else self.max_turns_per_sid,
            max_context_tokens=max_context_tokens or None,
            fork_threshold_tokens=self.fork_threshold_tokens,
        )
        base = Sample(session_id=sid)
        self.server.open_session(base, {**_SAMPLING, **(sampling_defaults or {})}, key=sid, limits=limits)

    async def shutdown_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """Refuse further requests; open requests have `wait_timeout` seconds to end."""
        session = self.server.sessions.get(sid)
        if session is not None:
            await self._in_its_loop(self._shut_down(session, wait_timeout))

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample | None = None,
        reward: float | dict[str, Any] | None = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        wait_timeout: float = 5.0,
    ) -> list[Sample]:
        """Return the session's trajectories as samples with a common `rollout_id`, each with the whole reward.

        Args:
            sid: Key given to `open_session`; a session that is not open gives no samples.
            base_sample: Sample to copy everything but the response from; None: an empty sample.
            reward: Reward of the run.
            extra_metadata: Entries added to the samples' metadata, besides `truncated`, `use_tool` and `ill_formed`.
            wait_timeout: Seconds that open requests have to end.

        Returns:
            No samples for a session in which nothing was sampled (the log has the reason); one ABORTED sample if the
            engine interrupted the session.
        """
        await self.shutdown_session(sid, wait_timeout=wait_timeout)
        session = self.server.sessions.pop(sid, None)
        if session is None:
            return []
        session.base = base_sample or session.base
        samples = session_samples(session, reward, None)
        if samples[0].status == SampleStatus.FAILED:
            logger.warning("session %s: %s", sid, samples[0].metadata["failure"]["error"])
            return []
        for sample in samples:
            noted = sample.metadata.get("agent", {})
            flags = {
                "truncated": sample.status == SampleStatus.TRUNCATED,
                "use_tool": bool(noted.get("tool_calls")),
                "ill_formed": bool(noted.get("ill_formed")),
            }
            sample.metadata = {**sample.metadata, **(extra_metadata or {}), **flags}
        return samples

    async def drop_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """End the session and discard its samples."""
        await self.shutdown_session(sid, wait_timeout=wait_timeout)
        self.server.sessions.pop(sid, None)

    async def _shut_down(self, session: Session, wait_timeout: float) -> None:
        session.closed = True
        running = {task for task in session.running if task is not asyncio.current_task()}
        if running:
            await asyncio.wait(running, timeout=wait_timeout)
        await self.server.close_session(session.key)

    async def _in_its_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's event loop."""
        if self._loop is None or self._loop is asyncio.get_running_loop() or self._loop.is_closed():
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


__all__ = ["BaseAdapter", "TurnRecord", "flatten_content"]
__getattr__ = _missing.names(__name__)
