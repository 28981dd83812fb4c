"""What SGLang answered, version by version (`sglang_answers.json`), and what slime makes of it and of changes to it.

`tests/backends/test_sglang_answers.py` asks the installed version for the same.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slime_engine_http.api import transport
from slime_engine_http.api.versions import TESTED_VERSIONS, untested
from slime_engine_http.weights.check import checksums
from slime_engine_http.weights.protocol import server_facts

from slime_core.errors import EngineError, SlimeError
from tests.unit.engines.sglang.api.servers import Reaction, engine_at, servers

ANSWERS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("sglang_answers.json").read_text())
"""Version -> path -> answer; of /server_info what slime reads, without what a clock says."""
NAMES = f"slime is tested with SGLang {' and '.join(TESTED_VERSIONS)}"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "FIRST_DELAY_S", 0.01)


def answering(version: str, change: Change = lambda _: None) -> Reaction:
    """A server of that version, of which one thing is otherwise."""
    answers = copy.deepcopy(ANSWERS[version])
    change(answers)

    async def react(server: Any, request: Any, body: Any, before: int) -> Any:
        found = answers.get(request.path, {"success": True})
        return (400, found) if found.get("success") is False else found

    return react


@pytest.mark.parametrize("version", TESTED_VERSIONS)
async def test_a_tested_version_is_understood(version: str, caplog: pytest.LogCaptureFixture) -> None:
    async with servers(answering(version)) as (server,), engine_at(server, check_weight_update_equal=True) as engine:
        info = await engine.info()
        assert (info["version"], info["num_running"], info["max_context_length"]) == (version, 0, 506)
        output = await engine.generate([5, 6, 7], {"max_new_tokens": 3})
        assert output.token_ids == [25, 25, 25]
        assert output.meta_info["token_weight_versions"] == [0, 0, 0]
        assert [await engine.can_release(), engine.weight_transports] == [[], ("distributed", "disk")]
        (worker,) = engine.pool.workers
        told = await checksums(engine.http, worker, await server_facts(engine.http, worker.url), 5.0)
        assert (0, "model.norm.weight") in told
    assert caplog.text == ""


async def test_another_version_is_warned_of_by_the_engine_and_by_a_check(caplog: pytest.LogCaptureFixture) -> None:
    other = answering("0.5.23", lambda answers: answers["/server_info"].update(version="0.6.1"))
    async with servers(other) as (server,), engine_at(server):
        warned = f"{server.url}: {NAMES}, not with 0.6.1. To have one of them, type: pip install sglang==0.5.23"
        assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [warned]
    assert untested("0.5.23+cu129") == untested("v0.5.20") == untested("slime 0.1.0") == untested("") == ""
    assert untested("0.5.23.post1").startswith(NAMES)


# -- what a next version may change ----------------------------------------------------------------


def _spans_as_pairs(answers: dict[str, Any]) -> None:
    answers["/generate"]["meta_info"]["weight_versions"] = [["default", 0, 3]]


def _log_probs_as_objects(answers: dict[str, Any]) -> None:
    meta = answers["/generate"]["meta_info"]
    meta["output_token_logprobs"] = [{"logprob": -1.0, "token": 25}] * 3


async def _generate(engine: Any) -> None:
    await engine.generate([5, 6, 7], {"max_new_tokens": 3})


@pytest.mark.parametrize(
    ("change", "call", "message"),
    [
        (_spans_as_pairs, _generate, "/generate: SGLang answers otherwise than expected, tokens"),
        (_log_probs_as_objects, _generate, "/generate: SGLang answers otherwise than expected, tokens"),
        (lambda a: a["/v1/loads"].update(loads={"0": {}}), lambda e: e.info(),
         "/v1/loads: SGLang answers otherwise than expected, loads, a list with num_running_reqs"),
        (lambda a: a["/v1/loads"].update(loads=[{"running": 2}]), lambda e: e.info(), "KeyError('num_running_reqs')"),
    ],
)  # fmt: skip
async def test_an_answer_that_changed_is_one_clear_error(change: Change, call: Any, message: str) -> None:
    async with servers(answering("0.5.23", change)) as (server,), engine_at(server) as engine:
        with pytest.raises(EngineError) as raised:
            await call(engine)
        assert message in str(raised.value)
        assert NAMES in str(raised.value)


def _rank(answers: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answers["/weights_checker"]["ranks"][0]
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a["/server_info"].update(tp_size="auto"), "0.5.23 answers otherwise than expected, tp_size and"),
        (lambda a: _rank(a).pop("checksums"), "KeyError('checksums')"),
        (lambda a: a["/weights_checker"].update(success=False, message="no pause"), "does not tell checksums"),
    ],
)  # fmt: skip
async def test_weights_that_cannot_be_read_back_are_one_clear_error(change: Change, message: str) -> None:
    async with servers(answering("0.5.23", change)) as (server,):
        with pytest.raises(SlimeError) as raised:
            async with engine_at(server, check_weight_update_equal=True):
                pass
    assert message in str(raised.value)


# -- inside the servers ----------------------------------------------------------------------------
