from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from slime_engine_http.api.answers import Pieces, token_weight_versions, versions_in
from slime_engine_http.api.continuation import joined, rest_of
from slime_engine_http.api.flights import Flight
from slime_engine_http.api.requests import generate_request

from slime_core.errors import EngineError
from slime_core.protocols import GenerateTraits
from slime_core.rollout.generate import _check_images
from slime_core.sample import GenerationOutput, Sample
from tests.sweeps import sweep
from tests.unit.engines.sglang.api.servers import Reaction, Server, answer, engine_at, generating, servers, sse


def test_a_request_as_sglang_reads_it() -> None:
    params = {"temperature": 1, "stop": ["a", "b"], "stop_token_ids": (1, 2), "top_p": None, "sampling_seed": 2**40}
    assert generate_request([1, 2], params, "r", vocab_size=3) == {
        "input_ids": [1, 2], "sampling_params": params, "rid": "r", "return_logprob": True,
    }  # fmt: skip
    assert generate_request([1], {}, "r", routed_experts=True)["return_routed_experts"] is True


@sweep(
    "ids, params, message",
    [
        ([], {}, "input_ids is empty"),
        ([5, 320], {}, "320 is beyond the vocabulary of 320 tokens"),
        ([-1], {}, "integers >= 0"),
        ([True], {}, "integers >= 0"),
        (["1"], {}, "integers >= 0"),
        ([1, 2**70], {}, "integers >= 0"),
        ([1], {"temprature": 1.0}, "unknown key 'temprature'. Did you mean 'temperature'"),
        ([1], {"max_new_tokens": "many"}, "max_new_tokens is 'many'; allowed: an integer"),
        ([1], {"temperature": float("nan")}, "temperature is nan; allowed: a number"),
        ([1], {"stop": [1]}, "allowed: a string or a list of strings"),
        ([1], {"stop_token_ids": [3, 320]}, "stop_token_ids beyond the vocabulary of 320 tokens"),
        ([1], {"custom_params": 3}, "allowed: a mapping"),
        ([1], {"logit_bias": {"3": "a"}}, "allowed: a mapping of token ids to numbers"),
        ([1], {"n": 2}, "n is 2; allowed: 1;"),
    ],
)
def test_what_would_end_a_server_is_refused(ids: list[Any], params: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError) as caught:
        generate_request(ids, params, "r", vocab_size=320)
    assert message in str(caught.value)
    assert caught.value.url is None  # nobody was asked, so nobody is tried next


# -- answers ---------------------------------------------------------------------------------------------

URL = "http://h:1"


@pytest.mark.parametrize(
    ("meta", "versions", "names"),
    [
        ({"weight_version": "4"}, [4] * 5, {"4"}),
        ({"weight_version": "default"}, [0] * 5, {"default"}),
        (
            {
                "weight_version": "6",
                "weight_versions": [
                    {"version": "5", "start": 0, "end": 2},
                    {"version": "6", "start": 2, "end": 5},
                ],
            },
            [5, 5, 6, 6, 6],
            {"5", "6"},
        ),
        ({"weight_versions": [{"version": "5", "start": 0, "end": 9}], "weight_version": "5"}, [5] * 5, {"5"}),
        ({"weight_versions": [{"version": "5", "start": 0, "end": 3}], "weight_version": "5"}, [5] * 5, {"5"}),
        ({"weight_version": "7", "token_weight_versions": [6, 6, 7, 7, 7]}, [0] * 0, {"6", "7"}),
    ],
)
def test_weight_versions(meta: dict[str, Any], versions: list[int], names: set[str]) -> None:
    if versions:
        assert token_weight_versions(meta, 5) == versions
    assert versions_in(meta) == names
    assert Pieces(URL).add(answer(1, 2, 3, 4, 5, **meta)).meta_info["token_weight_versions"] == (
        versions or meta["token_weight_versions"]
    )


def chunk(*ids: int, total: int, text: str, reason: str | None = None) -> dict[str, Any]:
    body = answer(*ids, completion_tokens=total, finish_reason=None if reason is None else {"type": reason})
    return body | {"text": text}


def test_pieces_are_cumulative_or_what_is_new() -> None:
    whole = [chunk(1, total=1, text="a"), chunk(1, 2, total=2, text="ab"), chunk(1, 2, 3, total=3, text="abc")]
    new = [chunk(1, total=1, text="a"), chunk(2, total=2, text="b"), chunk(3, total=3, text="c")]
    for events in (whole, new):
        pieces = Pieces(URL)
        outputs = [pieces.add(event) for event in events]
        assert [o.token_ids for o in outputs] == [[1], [1, 2], [1, 2, 3]]
        assert [o.text for o in outputs] == ["a", "ab", "abc"]
        assert [len(o.log_probs) for o in outputs] == [1, 2, 3]
    assert pieces.add(chunk(total=3, text="", reason="abort")).token_ids == [1, 2, 3]
    with pytest.raises(EngineError, match="completion_tokens 7"):
        pieces.add(chunk(9, total=7, text=""))


@pytest.mark.parametrize(
    "body",
    [
        None, [], {"text": "x"}, {"meta_info": []}, {"meta_info": {"completion_tokens": 1}},
        answer(1, output_token_logprobs=[[None, 7, None]]), answer(1, output_token_logprobs=[[]]),
        answer(1, completion_tokens=5),
    ],
)  # fmt: skip
def test_what_is_no_answer(body: Any) -> None:
    with pytest.raises(EngineError, match="h:1/generate: SGLang answers otherwise than expected, tokens"):
        Pieces(URL).add(body)


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


# -- images of a request ---------------------------------------------------------------------------------

PNG = "data:image/png;base64,iVBORw=="


PNG_FILE = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize("wrong", ["/etc/passwd", "https://example.org/a.png", b"bytes"])
def test_a_server_is_never_asked_to_fetch(wrong: Any) -> None:
    with pytest.raises(EngineError, match="is no data:image"):
        generate_request([1], {}, "r", image_data=[wrong])


def test_servers_are_sent_one_token_for_each_image() -> None:
    ids = [1, 9, 9, 9, 2, 9, 3]
    body = generate_request(ids, {}, "r", image_data=[PNG, PNG], image_token=9)
    assert body["input_ids"] == [1, 9, 2, 9, 3]
    assert generate_request(ids, {}, "r", image_token=9)["input_ids"] == ids, "no images: the ids are the caller's"
    with pytest.raises(EngineError, match="2 runs of the image token 9, and 1 images"):
        generate_request(ids, {}, "r", image_data=[PNG], image_token=9)


def test_a_server_that_makes_other_tokens_of_an_image_is_found_out() -> None:
    flight = Flight({}, None, prompt=7)
    flight.whole(GenerationOutput([5], [-0.5], "x", {"prompt_tokens": 7}))
    with pytest.raises(EngineError, match="read a prompt with images as 8 tokens, and slime as 7: their image proc"):
        flight.whole(GenerationOutput([5], [-0.5], "x", {"prompt_tokens": 8}))


def test_a_generate_function_that_leaves_images_out_gets_no_sample_with_images() -> None:
    from slime_core.errors import RolloutError

    sample = Sample(index=0, tokens=[3], multimodal_inputs={"images": [PNG_FILE]})
    with pytest.raises(RolloutError, match="which mine does not give to the engine"):
        _check_images(sample, SimpleNamespace(label="mine", traits=GenerateTraits()))  # type: ignore[arg-type]
    _check_images(sample, SimpleNamespace(label="mine", traits=GenerateTraits(takes_images=True)))  # type: ignore[arg-type]
    sample.tokens = []
    with pytest.raises(RolloutError, match="images but no tokens"):
        _check_images(sample, SimpleNamespace(label="mine", traits=GenerateTraits(takes_images=True)))  # type: ignore[arg-type]
    _check_images(Sample(), SimpleNamespace(label="mine", traits=GenerateTraits()))  # type: ignore[arg-type]
