from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from slime_engine_http.api.requests import generate_request, vocab_size_of
from slime_engine_http.api.transport import encoded

from slime_core.errors import EngineError
from tests.sweeps import sweep


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
        ([1.5], {}, "integers >= 0"),
        ([True], {}, "integers >= 0"),
        ([None], {}, "integers >= 0"),
        (["1"], {}, "integers >= 0"),
        ([[], 1], {}, "integers >= 0"),
        ([[1, 2]], {}, "integers >= 0"),
        ([1e3], {}, "integers >= 0"),
        ([1, 2**70], {}, "integers >= 0"),
        ([1, object()], {}, "integers >= 0"),
        ([1], {"temprature": 1.0}, "unknown key 'temprature'. Did you mean 'temperature'"),
        ([1], {"max_new_tokens": "many"}, "max_new_tokens is 'many'; allowed: an integer"),
        ([1], {"temperature": float("nan")}, "temperature is nan; allowed: a number"),
        ([1], {"skip_special_tokens": {}}, "skip_special_tokens is {}; allowed: true or false"),
        ([1], {"stop": [1]}, "allowed: a string or a list of strings"),
        ([1], {"stop_token_ids": ["a"]}, "allowed: a list of token ids"),
        ([1], {"stop_token_ids": [3, 320]}, "stop_token_ids beyond the vocabulary of 320 tokens"),
        ([1], {"stop_token_ids": [-1]}, "stop_token_ids beyond the vocabulary of 320 tokens"),
        ([1], {"top_k": True}, "top_k is True; allowed: an integer"),
        ([1], {"custom_params": 3}, "allowed: a mapping"),
        ([1], {"logit_bias": {"3": "a"}}, "allowed: a mapping of token ids to numbers"),
        ([1], {"logit_bias": {"a": 1.0}}, "allowed: a mapping of token ids to numbers"),
        ([1], {"n": 2}, "n is 2; allowed: 1;"),
        ([1], {"regex": 3}, "allowed: a string"),
    ],
)
def test_what_would_end_a_server_is_refused(ids: list[Any], params: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError) as caught:
        generate_request(ids, params, "r", vocab_size=320)
    assert message in str(caught.value)
    assert caught.value.url is None  # nobody was asked, so nobody is tried next


def test_numpy_and_tuples_are_token_ids_too() -> None:
    for ids in (np.array([4, 5]), (4, 5), [np.int64(4), np.int32(5)]):
        assert orjson.loads(encoded(generate_request(ids, {}, "r", vocab_size=6), None)[0] or b"")["input_ids"] == [
            4,
            5,
        ]
        with pytest.raises(EngineError, match="5 is beyond"):
            generate_request(ids, {}, "r", vocab_size=5)


def test_the_vocabulary_is_the_checkpoints(tmp_path: Path) -> None:
    assert vocab_size_of(str(tmp_path)) is None
    assert vocab_size_of(None) is None
    nested = {"vocab_size": 8}
    for config, size in (
        ({"vocab_size": 7}, 7), ({"text_config": nested}, 8), ({"vocab_size": 7, "text_config": nested}, 8),
        ({"vocab_size": 7, "text_config": {}}, 7), ({"llm_config": nested, "vision_config": {"vocab_size": 3}}, 8),
        ({"thinker_config": {"text_config": nested}}, 8), ({"text_config": None}, None), ({}, None), ([], None),
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert vocab_size_of(str(tmp_path)) == size
