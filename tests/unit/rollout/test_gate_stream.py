"""Streams count for the engine's gate as other requests do."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from slime_core.rollout.gate import GatedEngine
from tests.agent_toys import StreamingEngine, ToyTokenizer


class Notified(StreamingEngine):
    """Says when it may step, as the embedded engine asks."""

    def notify(self) -> None:
        """Nothing to wake."""


async def test_a_stream_waits_for_the_engine_like_any_request() -> None:
    engine: Any = Notified(["abcdefgh"], tokenizer=ToyTokenizer())
    gated = GatedEngine(engine, deterministic=True)
    with gated.hold():
        assert not engine.may_step(), "the sample runs user code"
        async with aclosing(gated.stream([1], {"max_new_tokens": 9}, rid="r")) as outputs:
            lengths = []
            async for output in outputs:
                assert engine.may_step()
                lengths.append(len(output.token_ids))
        assert lengths == [3, 6, 9]
        assert not engine.may_step()
    assert gated.take_busy_seconds() >= 0
