from __future__ import annotations

from typing import Any

import pytest
from slime_engine_http.api.requests import generate_request

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
