"""A reward from a frozen model of the same run: the mean log-prob that the model gives to the response's tokens.

Every call looks up the model's address, since the address is known only while the engine runs.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen

from slime_engine_sglang import get_model_url
from slime_rewards.remote import JsonClient

from slime_core import Sample

MODEL = "judge"
TIMEOUT_S = 60.0
_client = JsonClient(connections=64)


async def reward(args: Any, sample: Sample) -> float:
    """Score a sample in the run's event loop, which allows many requests at a time."""
    answer = await _client.post(get_model_url(args, MODEL), question(sample), timeout=TIMEOUT_S)
    return mean_log_prob(answer, sample)


def blocking(args: Any, sample: Sample) -> float:
    """Score a sample like `reward`, but as a plain function, which runs in a worker process."""
    body = json.dumps(question(sample)).encode()
    request = Request(get_model_url(args, MODEL), body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=TIMEOUT_S) as answer:
        return mean_log_prob(json.load(answer), sample)


def question(sample: Sample) -> dict[str, Any]:
    """Return the body of SGLang's `POST /generate` that scores the response without generating."""
    return {
        "input_ids": sample.tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": len(sample.tokens) - sample.response_length - 1,
    }


def mean_log_prob(answer: dict[str, Any], sample: Sample) -> float:
    """Return the mean log-prob of the response's tokens; the server's entries are [log-prob, token, text]."""
    if not sample.response_length:
        return 0.0
    entries = answer["meta_info"]["input_token_logprobs"][-sample.response_length :]
    return float(sum(entry[0] for entry in entries) / len(entries))
