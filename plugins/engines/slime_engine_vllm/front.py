"""SGLang's HTTP API in front of the vLLM engine, for functions that post to `args.sglang_router_ip`.

vLLM's servers do not speak it. The installed `slime.http_servers` plugin serves it, in the rollout stage's event loop.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from slime_engine_http.api.engine import HttpEngine

from slime_core.distributions import entry_points
from slime_core.errors import EngineError
from slime_core.protocols import Args
from slime_core.sample import GenerationOutput

Served = tuple[str, int, Callable[[], Awaitable[None]]]
"""Host, port, and a function that stops serving."""


class Front:
    """The engine as the HTTP server uses one; other calls are the engine's own."""

    failed = False

    def __init__(self, engine: HttpEngine, args: Args, tokenizer: Any) -> None:
        """Store the engine, the run's settings and the model's tokenizer or None."""
        self._engine, self.args, self.tokenizer = engine, args, tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def weight_version(self) -> int:
        """Weight version that the servers serve; 0 before the first update."""
        return self._engine.pool.version_wanted or 0

    async def info(self) -> dict[str, Any]:
        """Return the engine's information, with SGLang's keys."""
        return {"model_type": "", "num_used_tokens": 0, "max_total_num_tokens": 0, **await self._engine.info()}

    async def generate(
        self, ids: Sequence[int], params: Mapping[str, Any], *, rid: str | None = None, adapter: str | None = None,
        **options: Any,
    ) -> GenerationOutput:  # fmt: skip
        """Continue the ids. Raises EngineError."""
        _refuse(len(ids), **options)
        return await self._engine.generate(ids, params, rid=rid, adapter=adapter)

    def stream(
        self, ids: Sequence[int], params: Mapping[str, Any], *, rid: str | None = None, adapter: str | None = None,
        **options: Any,
    ) -> AsyncIterator[GenerationOutput]:  # fmt: skip
        """Continue the ids, and yield the output so far."""
        _refuse(len(ids), **options)
        return self._engine.stream(ids, params, rid=rid, adapter=adapter)


async def serve(engine: HttpEngine, args: Args, tokenizer: Any) -> Served:
    """Serve on a free port until the returned function is called. Raises EngineError without a server plugin."""
    for _, entry, _ in entry_points("slime.http_servers"):
        served: Served = await entry.load()(
            Front(engine, args, tokenizer), os.environ.get("SLIME_HOST_IP") or "127.0.0.1", 0
        )
        return served
    raise EngineError("nothing installed serves an engine over HTTP; type: pip install slime-rl")


def _refuse(length: int, logprob_start: int | None = None, **options: Any) -> None:
    """Raise EngineError for an option without a counterpart. SGLang's `logprob_start` is by default the last token."""
    odd = [name for name, value in options.items() if value]
    if logprob_start is not None and logprob_start < length - 1:
        odd.append("logprob_start")
    if odd:
        raise EngineError(f"the vLLM engine does not support {odd[0]}")
