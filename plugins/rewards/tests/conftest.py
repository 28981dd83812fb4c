"""A teacher to talk to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from slime_testing_contracts import ScriptedService
from slime_testing_contracts.service import Asked


class Teacher(ScriptedService):
    """Scores token t with -t / 10, after refusing `failures` requests; the likeliest tokens are 0, 1, ...

    It answers /generate as SGLang does, and /v1/completions as vLLM does.
    """

    def __init__(self) -> None:
        super().__init__(self._said)
        self.failures = 0

    @property
    def requests(self) -> list[Any]:
        return [(asked.path, asked.body) for asked in self.asked]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def _said(self, asked: Asked) -> Any:
        if self.failures:
            self.failures -= 1
            return 503, {}
        return _completion(asked.body) if "prompt" in asked.body else _generated(asked.body)


def _generated(body: dict[str, Any]) -> dict[str, Any]:
    ids = body["input_ids"][body["logprob_start_len"] :]
    meta = {"input_token_logprobs": [[None if i == 0 else -t / 10, t, None] for i, t in enumerate(ids)]}
    if number := body.get("top_logprobs_num"):
        top = [[-t / 10, t, None] for t in range(number)]
        meta["input_top_logprobs"] = [None if i == 0 else top for i in range(len(ids))]
    return {"text": "", "meta_info": meta}


def _completion(body: dict[str, Any]) -> dict[str, Any]:
    def row(token: int) -> dict[str, Any]:
        shown = [token, *(t for t in range(body["prompt_logprobs"]) if t != token)]
        return {str(t): {"logprob": -t / 10, "rank": t + 1, "decoded_token": "?"} for t in shown}

    return {"choices": [{"text": "", "prompt_logprobs": [None, *map(row, body["prompt"][1:])]}]}


@pytest.fixture
def teacher() -> Iterator[Teacher]:
    with Teacher() as running:
        yield running
