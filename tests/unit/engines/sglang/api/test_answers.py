from __future__ import annotations

from typing import Any

import pytest
from slime_engine_http.api.answers import Pieces, token_weight_versions, versions_in

from slime_core import Sample
from slime_core.errors import EngineError
from tests.unit.engines.sglang.api.servers import answer

URL = "http://h:1"


def test_tokens_log_probs_and_text() -> None:
    output = Pieces(URL).add(answer(7, 8, version="3"))
    assert (output.token_ids, output.log_probs, output.text) == ([7, 8], [-0.5, -0.5], "xx")
    assert "output_token_logprobs" not in output.meta_info
    assert output.meta_info["token_weight_versions"] == [3, 3]


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


def test_everything_reaches_the_sample() -> None:
    meta = {
        "weight_versions": [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}],
        "weight_version": "2", "prompt_tokens": 3, "cached_tokens": 2,
        "spec_verify_ct": 4, "spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 8,
    }  # fmt: skip
    output = Pieces(URL).add(answer(5, 6, reason="stop", **meta))
    sample = Sample(tokens=[1, 2, 3])
    sample.append_response_tokens(
        None, output.token_ids, output.log_probs, meta_info=output.meta_info, text=output.text
    )
    stored = Sample.from_dict(sample.to_dict())
    for found in (sample, stored):
        assert found.token_weight_versions == [1, 2]
        assert found.weight_versions == ["2"]
        assert found.status == Sample.Status.COMPLETED
        assert (found.spec_info.spec_accept_rate, found.spec_info.spec_accept_length) == (3 / 8, 2 / 4)
        assert (found.prefix_cache_info.cached_tokens, found.prefix_cache_info.total_prompt_tokens) == (2, 3)


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


def test_a_request_aborted_in_the_queue_has_no_log_probs() -> None:
    body = answer(reason="abort")
    del body["meta_info"]["output_token_logprobs"]
    assert Pieces(URL).add(body).token_ids == []


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
