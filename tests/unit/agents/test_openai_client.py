"""The real `openai` client against the endpoints."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
import pytest
from slime_agent_base_url import SessionLimits
from slime_serving.front.wanted import tool_call
from slime_testing_contracts import Reply

from slime_core.errors import EngineError
from tests.agent_toys import PARAMS, ToyTokenizer, call_text

TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "sum", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}]  # fmt: skip
FLAT: Any = [{"type": "function", **TOOLS[0]["function"]}]


def client(server: Any, session: Any, **options: Any) -> openai.AsyncOpenAI:
    key = options.pop("api_key", session.key)
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=key, **options)


def say(*texts: str) -> Any:
    return [{"role": "user", "content": text} for text in texts]


async def test_two_turns_become_one_sample_of_exactly_what_was_sampled(serve: Any) -> None:
    async with serve(["Hello there ", "Bye"]) as (server, session, engine):
        async with client(server, session) as api:
            first = await api.chat.completions.create(model="m", messages=say("hi"), logprobs=True)
            message = first.choices[0].message
            assert (message.content, first.choices[0].finish_reason) == ("Hello there ", "stop")
            assert first.model == "m"
            assert first.usage is not None
            assert first.usage.completion_tokens == len("Hello there ") + 1
            assert first.choices[0].logprobs is not None
            assert [t.logprob for t in first.choices[0].logprobs.content or []] == [-0.5] * 13
            # As agents do, the text comes back stripped: the sampled blank stays in the tokens all the same.
            history = [*say("hi"), {"role": "assistant", "content": "Hello there"}, *say("go")]
            second = await api.chat.completions.create(model="m", messages=history)
            assert second.choices[0].message.content == "Bye"
        (sample,) = await server.finish_session(session.key, 0.5)
        tokenizer = ToyTokenizer()
        assert tokenizer.decode(sample.tokens) == (
            "<|user|>hi<|end|><|assistant|>Hello there <|end|><|user|>go<|end|><|assistant|>Bye<|end|>"
        )
        middle = len(tokenizer.encode("<|user|>go<|end|><|assistant|>"))
        assert sample.loss_mask == [1] * 13 + [0] * middle + [1] * 4
        assert sample.token_weight_versions == [3] * 13 + [-1] * middle + [3] * 4
        assert engine.requests[1].input_ids == sample.tokens[:-4]
        assert (sample.reward, sample.rollout_id, sample.status) == (0.5, 7, "completed")
        assert sample.metadata["agent"]["drifted"] == 1
        sample.validate()


@pytest.mark.parametrize("engine_streams", [False, True])
async def test_a_stream_is_the_whole_answer_in_pieces(serve: Any, engine_streams: bool) -> None:
    text = "<think>a + b is < c</think>It is 3 < 4, so " + call_text("add", a=1, b=2)
    async with serve([text], stream=engine_streams) as (server, session, engine):
        async with client(server, session) as api:
            stream = await api.chat.completions.create(
                model="m", messages=say("x"), tools=TOOLS, stream=True, stream_options={"include_usage": True}
            )
            content, reasoning, arguments, finish, usage = [], [], "", None, None
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    content += [choice.delta.content] if choice.delta.content else []
                    extra = getattr(choice.delta, "reasoning_content", None)
                    reasoning += [extra] if extra else []
                    for call in choice.delta.tool_calls or []:
                        arguments += (call.function and call.function.arguments) or ""
                    finish = choice.finish_reason or finish
            assert "".join(content) == "It is 3 < 4, so"
            assert "".join(reasoning) == "a + b is < c"
            assert json.loads(arguments) == {"a": 1, "b": 2}
            assert finish == "tool_calls"
            assert usage is not None
            assert usage.prompt_tokens > 0
            assert (len(content) > 2) == engine_streams, "pieces where the engine streams, else whole"
            assert engine.requests[0].session_id == "s", "turns of a session go to one server"
        assert not session.warnings


async def test_the_responses_api_goes_on_by_id_and_by_items(serve: Any) -> None:
    first_turn = "<think>add them</think>" + call_text("add", a=1, b=2)
    async with serve([first_turn, "3", "again 3"]) as (server, session, _):
        async with client(server, session) as api:
            one = await api.responses.create(model="m", input="1+2?", instructions="Be brief.", tools=FLAT)
            assert [item.type for item in one.output] == ["reasoning", "function_call"]
            call: Any = one.output[1]
            assert json.loads(call.arguments) == {"a": 1, "b": 2}
            result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
            two = await api.responses.create(
                model="m", instructions="Be brief.", tools=FLAT, previous_response_id=one.id, input=[result]
            )
            assert two.output_text == "3"
            assert two.status == "completed"
            items: Any = [{"role": "user", "content": "1+2?"}, *(o.model_dump() for o in one.output), result]
            three = await api.responses.create(model="m", instructions="Be brief.", tools=FLAT, input=items)
            assert three.output_text == "again 3"
            assert three.usage is not None
        first, second = await server.finish_session(session.key, 1.0)
        assert first.rollout_id == second.rollout_id == 7
        tokenizer = ToyTokenizer()
        assert tokenizer.decode(first.response_tokens).endswith("<|tool|>3<|end|><|assistant|>3<|end|>")
        assert tokenizer.decode(second.response_tokens) == "again 3<|end|>", "the shared call is trained once"
        assert "add them" in tokenizer.decode(second.prompt_tokens), "sampled reasoning is context, untouched"


async def test_responses_stream_events_add_up(serve: Any) -> None:
    text = "<think>hm, so</think>Seven it is. " + call_text("add", a=3, b=4)
    async with serve([text], stream=True) as (server, session, _), client(server, session) as api:
        async with api.responses.stream(model="m", input="3+4", tools=FLAT) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds.count("response.output_text.delta") > 1
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert final.output_text == "Seven it is."
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


async def test_errors_have_their_status_and_shape(serve: Any) -> None:
    limits = SessionLimits(max_turns=1)
    async with serve(["one"], limits=limits) as (server, session, engine):
        async with client(server, session, api_key="sk-nobody") as stranger:
            with pytest.raises(openai.AuthenticationError, match="no open session"):
                await stranger.chat.completions.create(model="m", messages=say("x"))
        async with client(server, session) as api:
            with pytest.raises(openai.BadRequestError, match="n is 2"):
                await api.chat.completions.create(model="m", messages=say("x"), n=2)
            with pytest.raises(openai.BadRequestError, match="response_format"):
                await api.chat.completions.create(model="m", messages=say("x"), response_format={"type": "json_object"})
            with pytest.raises(openai.BadRequestError, match="unknown field 'wish'"):
                await api.chat.completions.create(model="m", messages=say("x"), extra_body={"wish": 1})
            for calls in (5, [5], {"id": "1"}, [{"function": "add"}]):
                answered: Any = {"role": "assistant", "content": "", "tool_calls": calls}
                with pytest.raises(openai.BadRequestError, match=r"tool_calls|function is 'add'"):
                    await api.chat.completions.create(model="m", messages=[*say("x"), answered, *say("y")])
            await api.chat.completions.create(model="m", messages=say("x"), seed=5, temperature=0.2)
            with pytest.raises(openai.RateLimitError, match="1 turns"):
                await api.chat.completions.create(model="m", messages=say("x"))
            await server.close_session(session.key)
            with pytest.raises(openai.InternalServerError) as closed:
                await api.chat.completions.create(model="m", messages=say("x"))
            assert closed.value.status_code == 503
        (sample,) = await server.finish_session(session.key, 0.0)
        assert len(engine.requests) == 1
        assert sample.metadata["agent"]["warnings"] == {
            "seed has no effect": 1,
            "temperature has no effect: the run's is used": 1,
        }
        assert sample.metadata["agent"]["truncated"]
        assert len(sample.metadata["agent"]["errors"]) == 9


async def test_an_engine_that_fails_is_502_and_a_session_without_answers_fails(serve: Any) -> None:
    async with serve([EngineError("out of memory")]) as (server, session, _):
        async with client(server, session) as api:
            with pytest.raises(openai.InternalServerError, match="out of memory"):
                await api.chat.completions.create(model="m", messages=say("x"))
        (sample,) = await server.finish_session(session.key, 1.0)
        assert sample.status == "failed"
        assert "out of memory" in sample.metadata["failure"]["error"]
        assert sample.reward is None


async def test_a_message_that_cannot_fit_is_refused_and_the_loop_goes_on(serve: Any) -> None:
    async with serve(["small"]) as (server, session, engine):
        turns = [0.0]

        async def turning() -> None:
            while True:
                begun = time.monotonic()
                await asyncio.sleep(0.01)
                turns[0] = max(turns[0], time.monotonic() - begun)

        beat = asyncio.ensure_future(turning())
        async with client(server, session) as api:
            for size, kind in ((9_000_000, openai.BadRequestError), (30_000_000, openai.APIStatusError)):
                text = await asyncio.to_thread(lambda n=size: "word " * (n // 5))
                with pytest.raises(kind, match=r"characters|bytes"):
                    await api.chat.completions.create(model="m", messages=say(text))
            assert (await api.chat.completions.create(model="m", messages=say("x"))).choices[0].message.content
        beat.cancel()
        assert turns[0] < 10, "the rollout's loop stood still"
        assert len(engine.requests) == 1
        assert len(session.errors) == 1, "what the guard refuses has no session"


async def test_stop_strings_and_limits(serve: Any) -> None:
    def script(request: Any) -> Reply:
        if "STOP" in request.sampling_params.get("stop", []):
            return Reply("one STOP", meta={"finish_reason": {"type": "stop", "matched": "STOP"}})
        return Reply("x" * 40)

    limits = SessionLimits(max_response_tokens=30)
    async with serve(script, limits=limits) as (server, session, engine):
        async with client(server, session) as api:
            stopped = await api.chat.completions.create(model="m", messages=say("q"), stop=["STOP"])
            assert stopped.choices[0].message.content == "one "
            capped = await api.chat.completions.create(model="m", messages=say("r"), max_completion_tokens=4)
            assert (capped.choices[0].finish_reason, capped.choices[0].message.content) == ("length", "xxxx")
            history: Any = [*say("q"), {"role": "assistant", "content": "one "}, *say("")]
            more = await api.chat.completions.create(model="m", messages=history)
            assert engine.requests[-1].sampling_params["max_new_tokens"] == 30 - 8 - 4
            longer: Any = [*history, {"role": "assistant", "content": more.choices[0].message.content}, *say("")]
            none = await api.chat.completions.create(model="m", messages=longer)
            assert (none.choices[0].finish_reason, none.choices[0].message.content) == ("length", "")
            assert len(engine.requests) == 3, "nothing is asked when there is no room"
        first, second = await server.finish_session(session.key, 1.0)
        assert {first.status, second.status} == {"truncated"}
        assert ToyTokenizer().decode(second.response_tokens)[:19] == "one STOP<|end|><|us", "the stop was sampled"


@pytest.mark.parametrize("stream", [False, True])
async def test_half_of_a_character_in_a_call_is_no_error_of_the_server(serve: Any, stream: bool) -> None:
    said = '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call><|end|>'
    half: Any = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": '{"city": "\\ud800"}'}}
    called: Any = [
        *say("hi"),
        {"role": "assistant", "tool_calls": [half]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
    ]
    async with serve([said, "ok<|end|>"], stream=stream) as (server, session, _):
        async with client(server, session, max_retries=0) as api:
            answer = await api.chat.completions.create(model="m", messages=say("hi"), tools=TOOLS, stream=stream)
            assert not stream or [chunk async for chunk in answer]
            await api.chat.completions.create(model="m", messages=called, tools=TOOLS)
        assert (session.turns, session.errors) == (2, [])
    raw = tool_call("1", "weather", half["function"]["arguments"])
    assert raw["function"]["arguments"] == {"raw": half["function"]["arguments"]}


async def test_a_client_that_leaves_ends_its_request_and_counts_for_nothing(serve: Any) -> None:
    begun = asyncio.Event()
    never = asyncio.Event()

    def script(request: Any) -> Reply:
        if len(begun_requests) == 0:
            begun_requests.append(request)
            begun.set()
            return Reply("late", until=never)
        return Reply("in time<|end|>")

    begun_requests: list[Any] = []
    async with serve(script) as (server, session, engine):
        async with client(server, session) as api:
            task = asyncio.ensure_future(api.chat.completions.create(model="m", messages=say("x")))
            await begun.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with asyncio.timeout(60):
                while not engine.aborted or session.turns:
                    await asyncio.sleep(0.01)
            assert engine.aborted == [begun_requests[0].rid]
            answer = await api.chat.completions.create(model="m", messages=say("x"))
            assert answer.choices[0].message.content == "in time"
        (sample,) = await server.finish_session(session.key, 1.0)
        assert sample.response == "in time<|end|>"
        assert sample.metadata["agent"]["disconnected"] == 1
        assert sample.metadata["agent"]["turns"] == 1


def test_sampling_of_the_client_counts_in_evaluation_only(serve: Any) -> None:
    async def run(evaluation: bool) -> Any:
        limits = SessionLimits(client_sampling=True)
        params = {**PARAMS, "sampling_seed": 1}
        async with serve(["a", "b"], limits=limits, params=params, evaluation=evaluation) as (server, session, engine):
            async with client(server, session) as api:
                await api.chat.completions.create(model="m", messages=say("x"), temperature=0.25)
                await api.chat.completions.create(model="m", messages=say("x"), temperature=0.25)
            seeds = [r.sampling_params["sampling_seed"] for r in engine.requests]
            assert len(set(seeds)) == 2, "the same question twice is answered independently"
            return engine.requests[0].sampling_params["temperature"]

    assert asyncio.run(run(True)) == 0.25
    assert asyncio.run(run(False)) == 1.0


async def test_a_session_that_is_closed_ends_its_requests(serve: Any) -> None:
    """Send status 503 where there is no answer so far, and the error where a stream has begun."""
    never = asyncio.Event()
    async with serve([Reply("late", until=never)]) as (server, session, _):
        async with client(server, session, max_retries=0) as api:
            whole = asyncio.ensure_future(api.chat.completions.create(model="m", messages=say("x")))
            while not session.rids:
                await asyncio.sleep(0.01)
            await server.close_session(session.key)
            with pytest.raises(openai.InternalServerError, match="run has ended") as closed:
                await whole
            assert closed.value.status_code == 503
        assert (session.turns, session.rids, session.running) == (0, set(), set())
    async with serve(["a long answer"], stream=True) as (server, session, engine):
        stream = engine.stream

        async def stands_still(*given: Any, **named: Any) -> Any:
            async for output in stream(*given, **named):
                yield output
                await never.wait()

        engine.stream = stands_still
        async with client(server, session, max_retries=0) as api:
            streamed = await api.chat.completions.create(model="m", messages=say("x"), stream=True)
            assert await anext(streamed)
            await server.close_session(session.key)
            with pytest.raises(openai.APIError, match="run has ended"):
                async for _ in streamed:
                    pass


async def test_a_short_conversation_needs_no_thread(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(["one<|end|>", "two<|end|>"]) as (server, session, _):
        called = list[str]()
        call = server.desk.threads.call

        async def noted(what: str, work: Any) -> Any:
            called.append(what)
            return await call(what, work)

        monkeypatch.setattr(server.desk.threads, "call", noted)
        async with client(server, session) as api:
            await api.chat.completions.create(model="m", messages=say("x" * 8000))
            assert called == []
            await api.chat.completions.create(model="m", messages=say("x" * 8200))
            assert called == ["rendering the messages"]
