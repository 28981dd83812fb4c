from __future__ import annotations

from typing import Any

import pytest
from slime_embedded.engine.sampling_params import SamplingParams

from slime_core.errors import EngineError


def test_defaults_and_none_are_sglangs() -> None:
    params = SamplingParams.parse({"temperature": None, "stop": None})
    assert params == SamplingParams()
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (128, 1.0, 1.0, -1)


def test_values_are_normalised() -> None:
    params = SamplingParams.parse({"stop": "a", "stop_token_ids": [3, 4], "max_new_tokens": 5.0, "temperature": 1})
    assert params.stop == ("a",)
    assert params.stop_token_ids == (3, 4)
    assert params.max_new_tokens == 5
    assert SamplingParams.parse({"stop": ["a", "", "b"]}).stop == ("a", "b")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"top-p": 0.5}, ["top-p", "top_p"]),
        ({"temprature": 0.5}, ["temprature", "temperature"]),
        ({"qqqq": 1}, ["qqqq", "max_new_tokens"]),
        ({"top_p": "0.5"}, ["top_p", "'0.5'", "number"]),
        ({"top_p": float("nan")}, ["top_p", "nan"]),
        ({"temperature": float("inf")}, ["temperature", "inf"]),
        ({"top_k": 0}, ["top_k", "0", "-1"]),
        ({"ignore_eos": 1}, ["ignore_eos", "true or false"]),
        ({"stop": [1]}, ["stop", "strings"]),
        ({"stop_token_ids": ["a"]}, ["stop_token_ids", "'a'"]),
        ({"sampling_seed": 1.5}, ["sampling_seed", "1.5"]),
        ({"repetition_penalty": 1e39}, ["repetition_penalty", "1e+39", "100"]),
        ({"presence_penalty": 9}, ["presence_penalty", "9"]),
    ],
)
def test_mistakes_name_key_value_and_what_is_allowed(raw: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(EngineError) as caught:
        SamplingParams.parse(raw)
    assert all(word in str(caught.value) for word in words)
