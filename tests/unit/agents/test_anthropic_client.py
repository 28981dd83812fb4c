"""The real `anthropic` client against the endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from slime_agent_base_url import SessionLimits
from slime_testing_contracts import Reply

from tests.agent_toys import ToyTokenizer, call_text

if TYPE_CHECKING:  # its import takes two seconds of every process that collects the tests
    import anthropic

TOOLS: Any = [{"name": "add", "description": "sum", "input_schema": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}]  # fmt: skip


def client(server: Any, session: Any, **options: Any) -> anthropic.AsyncAnthropic:
    import anthropic

    key = options.pop("api_key", session.key)
    return anthropic.AsyncAnthropic(base_url=server.url, api_key=key, **options)


def say(text: str) -> Any:
    return [{"role": "user", "content": text}]


async def test_tools_and_thinking_go_both_ways(serve: Any) -> None:
    turn = "<think>two sums</think>" + call_text("add", a=1, b=2) + call_text("add", a=3, b=4)
    async with serve([turn, "3, 7"]) as (server, session, engine):
        async with client(server, session) as api:
            first = await api.messages.create(
                model="m", max_tokens=200, system="Add.", messages=say("sums"), tools=TOOLS
            )
            assert [block.type for block in first.content] == ["thinking", "tool_use", "tool_use"]
            assert first.stop_reason == "tool_use"
            uses: Any = [b for b in first.content if b.type == "tool_use"]
            assert [u.input for u in uses] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
            results = [
                {"type": "tool_result", "tool_use_id": u.id, "content": [{"type": "text", "text": t}]}
                for u, t in zip(uses, "37")
            ]
            history: Any = [
                *say("sums"),
                {"role": "assistant", "content": [b.model_dump() for b in first.content]},
                {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
            ]
            count = await api.messages.count_tokens(model="m", system="Add.", messages=history, tools=TOOLS)
            last = await api.messages.create(model="m", max_tokens=200, system="Add.", messages=history, tools=TOOLS)
            assert last.content[0].type == "text"
            assert last.content[0].text == "3, 7"
            assert last.stop_reason == "end_turn"
            assert count.input_tokens == last.usage.input_tokens == len(engine.requests[1].input_ids)
            assert last.usage.output_tokens == 5
        (sample,) = await server.finish_session(session.key, 1.0)
        assert ToyTokenizer().decode(sample.response_tokens) == (
            turn + "<|end|><|tool|>3<|end|><|tool|>7<|end|><|user|>go on<|end|><|assistant|>3, 7<|end|>"
        )


@pytest.mark.parametrize("engine_streams", [False, True])
async def test_a_stream_is_the_whole_answer_in_pieces(serve: Any, engine_streams: bool) -> None:
    text = "<think>so it goes</think>I will add them. " + call_text("add", a=1, b=2)
    async with serve([text], stream=engine_streams) as (server, session, _), client(server, session) as api:
        async with api.messages.stream(model="m", max_tokens=300, messages=say("x"), tools=TOOLS) as stream:
            pieces = [piece async for piece in stream.text_stream]
            message = await stream.get_final_message()
        assert "".join(pieces) == "I will add them."
        assert (len(pieces) > 2) == engine_streams
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        thought, _, use = message.content
        assert thought.type == "thinking"
        assert thought.thinking == "so it goes"
        assert use.type == "tool_use"
        assert use.input == {"a": 1, "b": 2}
        assert message.stop_reason == "tool_use"


async def test_errors_stops_and_limits(serve: Any) -> None:
    import anthropic

    def script(request: Any) -> Reply:
        if "END" in request.sampling_params.get("stop", []):
            return Reply("one END", meta={"finish_reason": {"type": "stop", "matched": "END"}})
        return Reply("x" * 40)

    async with serve(script, limits=SessionLimits(max_turns=2)) as (server, session, _):
        async with client(server, session, api_key="nobody") as stranger:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await stranger.messages.create(model="m", max_tokens=5, messages=say("x"))
            body: Any = refused.value.body
            assert body["type"] == "error"
            assert body["error"]["type"] == "authentication_error"
        async with client(server, session, api_key="EMPTY") as unnamed:
            with pytest.raises(anthropic.AuthenticationError, match="there is no API key"):
                await unnamed.messages.create(model="m", max_tokens=5, messages=say("x"))
            with pytest.raises(anthropic.BadRequestError, match="unknown field"):  # whose it is comes first
                await unnamed.messages.create(
                    model="m", max_tokens=5, messages=say("x"), metadata={"user_id": session.key},
                    extra_body={"wish": 1},
                )  # fmt: skip
        bearer = client(server, session, api_key=None, auth_token=session.key)
        async with client(server, session) as api, bearer:
            stopped = await bearer.messages.create(model="m", max_tokens=50, messages=say("x"), stop_sequences=["END"])
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
            capped = await api.messages.create(model="m", max_tokens=4, messages=say("y"))
            assert capped.stop_reason == "max_tokens"
            content: Any = [{"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}]
            with pytest.raises(anthropic.BadRequestError, match="image"):
                await api.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": content}])
            with pytest.raises(anthropic.RateLimitError):
                await api.messages.create(model="m", max_tokens=4, messages=say("z"))
            assert [model.id async for model in await api.models.list()] == ["policy"]
