from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from slime_engine_http.api.continuation import joined, rest_of

from slime_core.sample import GenerationOutput
from tests.unit.engines.sglang.api.servers import Reaction, Server, answer, engine_at, generating, servers, sse


def body(**params: Any) -> dict[str, Any]:
    return {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 8, **params}, "rid": "r", "return_logprob": True}


def output(*ids: int, **meta: Any) -> GenerationOutput:
    return GenerationOutput(list(ids), [-float(i) for i in ids], "x" * len(ids), meta)


# -- the request for the rest ------------------------------------------------------------------------------


def test_the_rest_is_asked_for_behind_the_tokens_so_far() -> None:
    given = body(temperature=0.7, min_new_tokens=2, sampling_seed=3, repetition_penalty=1.0, stop=None, n=1)
    rest = rest_of(given, output(7, 8, 9))
    params = {**given["sampling_params"], "max_new_tokens": 5, "min_new_tokens": 0}
    assert rest == {**given, "input_ids": [1, 2, 7, 8, 9], "sampling_params": params}
    assert given == body(temperature=0.7, min_new_tokens=2, sampling_seed=3, repetition_penalty=1.0, stop=None, n=1)


@pytest.mark.parametrize(
    "params",
    [
        {"max_new_tokens": None}, {"max_new_tokens": 2}, {"n": 2}, {"stop": "ab"}, {"stop": ["ab"]}, {"regex": "a+"},
        {"json_schema": "{}"}, {"frequency_penalty": 0.5}, {"presence_penalty": -1}, {"repetition_penalty": 1.2},
        {"custom_params": {"a": 1}},
    ],
)  # fmt: skip
def test_what_depends_on_more_than_the_tokens_is_asked_as_a_whole(params: dict[str, Any]) -> None:
    assert rest_of(body(**params), output(7, 8)) is None


# -- both pieces -------------------------------------------------------------------------------------------


def test_two_pieces_are_one_answer_to_the_first_request() -> None:
    one = output(
        7, 8, id="a", prompt_tokens=2, cached_tokens=1, completion_tokens=2, weight_version="4", spec_verify_ct=2,
        token_weight_versions=[4, 4], finish_reason={"type": "abort"},
        weight_versions=[{"version": "4", "start": 0, "end": 2}],
    )  # fmt: skip
    two = output(
        9, id="b", prompt_tokens=4, cached_tokens=3, completion_tokens=1, weight_version="5", spec_verify_ct=1,
        token_weight_versions=[5], finish_reason={"type": "length", "length": 1},
        weight_versions=[{"version": "5", "start": 0, "end": 1}],
    )  # fmt: skip
    whole = joined(one, two)
    assert (whole.token_ids, whole.log_probs, whole.text) == ([7, 8, 9], [-7.0, -8.0, -9.0], "xxx")
    assert whole.meta_info == {
        "id": "a", "prompt_tokens": 2, "cached_tokens": 1, "completion_tokens": 3, "weight_version": "5",
        "spec_verify_ct": 3, "token_weight_versions": [4, 4, 5], "finish_reason": {"type": "length", "length": 3},
    }  # fmt: skip
    assert one.token_ids == [7, 8]


def test_each_token_keeps_the_experts_it_was_sampled_with() -> None:
    def coded(rows: int, value: int) -> str:
        return base64.b64encode(np.full((rows, 2, 3), value, dtype=np.int32).tobytes()).decode()

    whole = joined(output(7, 8, routed_experts=coded(3, 1)), output(9, 10, routed_experts=coded(5, 2)))
    found = np.frombuffer(base64.b64decode(whole.meta_info["routed_experts"]), dtype=np.int32).reshape(5, 2, 3)
    assert found[:, 0, 0].tolist() == [1, 1, 1, 2, 2]


# -- in the client -----------------------------------------------------------------------------------------


def cut_short(*pieces: dict[str, Any], interrupt: bool = True) -> Reaction:
    """Answers these in turn, each but the last cut short."""

    async def react(server: Server, request: Any, given: Any, before: int) -> Any:
        if interrupt and before < len(pieces) - 1:
            server.engine.pool.interrupt()  # type: ignore[attr-defined]
        return pieces[before]

    return generating(react)


PIECES = (answer(7, 8, version="1", reason="abort"), answer(9, version="1"))


async def test_a_request_that_an_update_ended_is_continued() -> None:
    async with servers(cut_short(*PIECES)) as (server,), engine_at(server) as engine:
        server.engine = engine  # type: ignore[attr-defined]
        found = await engine.generate([3], {"max_new_tokens": 3}, rid="mine")
        assert (found.token_ids, found.meta_info["finish_reason"]["type"]) == ([7, 8, 9], "length")
        assert (found.meta_info["id"], found.meta_info["token_weight_versions"]) == ("mine", [1, 1, 1])
        first, second = server.asked("/generate")
        assert (first["input_ids"], second["input_ids"]) == ([3], [3, 7, 8])
        assert second["sampling_params"] == {"max_new_tokens": 1}
        assert not second["rid"].startswith(first["rid"])
        metrics = engine.take_metrics()
        assert (metrics["engine/continued_requests"], metrics["engine/retried_requests"]) == (1, 0)


async def test_what_cannot_be_continued_is_asked_again() -> None:
    async with servers(cut_short(*PIECES)) as (server,), engine_at(server) as engine:
        server.engine = engine  # type: ignore[attr-defined]
        assert (await engine.generate([3], {"max_new_tokens": 3, "stop": "abc"})).token_ids == [9]
        assert [b["input_ids"] for b in server.asked("/generate")] == [[3], [3]]


async def test_a_stream_goes_on_without_showing_the_cut() -> None:
    def piece(*ids: int, reason: str | None = None) -> dict[str, Any]:
        return answer(*ids, finish_reason=None if reason is None else {"type": reason})

    async def react(server: Server, request: Any, given: Any, before: int) -> Any:
        if before:
            return await sse(request, piece(9), piece(9, 10, reason="stop"))
        engine.pool.interrupt()
        return await sse(request, piece(7), piece(7, 8, reason="abort"))

    async with servers(generating(react)) as (server,), engine_at(server) as engine:
        outputs = [o async for o in engine.stream([3], {"max_new_tokens": 6})]
        assert [o.token_ids for o in outputs] == [[7], [7, 8, 9], [7, 8, 9, 10]]
        assert [o.meta_info["finish_reason"] for o in outputs] == [None, None, {"type": "stop"}]
