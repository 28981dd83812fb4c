from __future__ import annotations

from typing import Any

import pytest
from slime_engine_http.api.answers import Pieces, token_weight_versions, versions_in

from slime_core.errors import EngineError
from tests.unit.engines.sglang.api.servers import answer

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
