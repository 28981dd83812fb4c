"""What SGLang answered, version by version (`sglang_answers.json`), and what slime makes of it and of changes to it.

`tests/backends/test_sglang_answers.py` asks the installed version for the same.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from slime_engine_sglang.api import transport
from slime_engine_sglang.api.transport import Http
from slime_engine_sglang.api.versions import TESTED_VERSIONS, untested
from slime_engine_sglang.api.worker import Worker
from slime_engine_sglang.environment import SERVER_SIDE
from slime_engine_sglang.weights.readers import Fused, reader_of

from slime_core.errors import EngineError, SlimeError
from tests.unit.engines.sglang_api.servers import Reaction, engine_at, servers

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
    trained = [("model.norm.weight", torch.ones(128))]
    async with servers(answering(version)) as (server,), engine_at(server, check_weight_update_equal=True) as engine:
        info = await engine.info()
        assert (info["version"], info["num_running"], info["max_context_length"]) == (version, 0, 506)
        output = await engine.generate([5, 6, 7], {"max_new_tokens": 3})
        assert output.token_ids == [25, 25, 25]
        assert output.meta_info["token_weight_versions"] == [0, 0, 0]
        assert [await engine.control.can_release(), engine.weight_transports] == [[], ("distributed", "disk")]
        reader = await reader_of(engine.http, engine.pool.workers[0], 5.0)
        ((size, stride, offset, checksum),) = (await reader.ask(trained))["model.norm.weight"]
        assert (size, stride, offset, checksum.partition(":")[0]) == ((128,), (1,), 0, "float32")
        assert reader.finding().extra == ["model.embed_tokens.weight"]
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
        (_spans_as_pairs, _generate, "/generate: not an answer of SGLang's API"),
        (_log_probs_as_objects, _generate, "/generate: not an answer of SGLang's API"),
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
        (lambda a: _rank(a).update(parallelism_info={"target": 1}), "0.5.23 answers otherwise than expected, one para"),
        (lambda a: _rank(a).pop("checksums"), "KeyError('checksums')"),
        (lambda a: _rank(a).update(checksums={"": "{}"}), "KeyError('parameters')"),
        (lambda a: a["/weights_checker"].update(success=False, message="no pause"), "cannot tell what it serves (no"),
    ],
)  # fmt: skip
async def test_weights_that_cannot_be_read_back_are_one_clear_error(change: Change, message: str) -> None:
    async with servers(answering("0.5.23", change)) as (server,):
        with pytest.raises(SlimeError) as raised:
            async with engine_at(server, check_weight_update_equal=True):
                pass
    assert message in str(raised.value)
    assert NAMES in str(raised.value)
    assert "PYTHONPATH" not in str(raised.value), "it has the plugin"


@pytest.mark.parametrize("version", TESTED_VERSIONS)
async def test_a_server_without_the_plugin_is_told_how_to_get_it(version: str) -> None:
    def without(answers: dict[str, Any]) -> None:
        answers["/weights_checker"] = answers["/weights_checker, an action it does not know"]

    async with servers(answering(version, without)) as (server,):
        with pytest.raises(SlimeError, match=r"Unsupported action.*; start it with slime's plugin .* PYTHONPATH"):
            async with engine_at(server, check_weight_update_equal=True):
                pass


async def test_draft_models_are_left_out_and_every_role_is_asked_for_its_stage() -> None:
    def drafted(answers: dict[str, Any]) -> None:
        rank = _rank(answers)
        rank["checksums"] |= {"draft_step_0.": '{"refused": "eagle"}', "draft_step_0.q.weight": "[]", "draft.": "{}"}
        rank["parallelism_info"] += [rank["parallelism_info"][0] | {"role": "draft_step_0"}]

    def staged(answers: dict[str, Any]) -> None:
        drafted(answers)
        _rank(answers)["parallelism_info"][1]["pp_size"] = 2

    http = Http()
    await http.open()
    try:
        async with servers(answering("0.5.23", drafted), answering("0.5.23", staged)) as (one, two):
            reader = Fused(http, Worker(one.url), 5.0, "0.5.23")
            await reader.probe()
            assert reader.finding().extra == ["model.embed_tokens.weight", "model.norm.weight"]
            with pytest.raises(EngineError, match="pipeline-parallel"):
                await Fused(http, Worker(two.url), 5.0, "0.5.23").probe()
    finally:
        await http.close()


# -- inside the servers ----------------------------------------------------------------------------


class Info:
    """`ParallelismInfo`."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self) -> dict[str, Any]:
        return self.fields


class Checker20:
    """`WeightChecker` of 0.5.20, as far as slime's plugin touches it; a checker for each model."""

    def _get_model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 3)

    def _snapshot(self) -> None: ...

    def handle(self, action: str, allow_quant_error: bool = False) -> Any:
        return f"its own answer to {action}"

    def _parallelism_info(self) -> Info:
        return Info(pp_size=1)


class Checker23(Checker20):
    """That of 0.5.23: each model has a role."""

    def handle(self, action: str, allow_quant_error: bool = False, skip: Any = None, *, role: str = "") -> Any:
        assert role
        return f"its own answer to {action}"

    def _parallelism_info(self, *, role: str = "") -> Info:
        assert role
        return Info(pp_size=1, role=role)


class CheckerOfTomorrow(Checker20):
    """The next one."""

    def _parallelism_info(self, where: str, why: str) -> Info:  # type: ignore[override]
        return Info()


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], Any]:
    """(checker's class) -> the plugin's `insides`, after it has taught that class the action."""

    def load(checker: type) -> Any:
        taught = type(checker.__name__, (checker,), {"handle": checker.handle})  # type: ignore[attr-defined]
        for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.utils.weight_checker"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["sglang.srt.utils.weight_checker"].WeightChecker = taught  # type: ignore[attr-defined]
        monkeypatch.syspath_prepend(str(SERVER_SIDE / "plugin"))
        insides = importlib.import_module("slime_sglang_plugin.insides")
        monkeypatch.setattr(insides.metadata, "version", lambda _: "0.6.1")
        importlib.import_module("slime_sglang_plugin.weight_action").apply()
        return SimpleNamespace(insides=insides, checker=taught())

    return load


ASK = 'slime:read-back [["weight", [3, 2], "float32"]]'


def test_the_plugin_answers_in_each_versions_form(plugin: Callable[[type], Any]) -> None:
    assert plugin(Checker20).insides.VERSIONS == TESTED_VERSIONS
    old, new = plugin(Checker20).checker, plugin(Checker23).checker
    assert old.handle(action=ASK, allow_quant_error=False)["parallelism_info"] == {"pp_size": 1}
    answer = new.handle(action=ASK, allow_quant_error=False, role="target")
    assert answer["parallelism_info"] == {"pp_size": 1, "role": "target"}
    assert "refused" in json.loads(answer["checksums"][""]), "a linear layer has no load_weights"
    assert new.handle(action=ASK, role="draft_step_0") is None
    assert new.handle(action="checksum", role="draft_step_0") == old.handle("checksum") == "its own answer to checksum"


def test_the_plugin_names_what_a_version_has_otherwise(
    plugin: Callable[[type], Any], caplog: pytest.LogCaptureFixture
) -> None:
    loaded = plugin(CheckerOfTomorrow)
    with pytest.raises(loaded.insides.Changed) as raised:
        loaded.checker.handle(action=ASK)
    assert str(raised.value).startswith(
        "slime's plugin knows SGLang 0.5.20 and 0.5.23; 0.6.1 has WeightChecker._parallelism_info() (from 0.5.23 on:"
        " role=) otherwise (TypeError: "
    )
    plugin(type("Nothing", (), {"handle": None}))  # a checker without snapshots
    assert "weights cannot be read back: slime's plugin knows SGLang 0.5.20 and 0.5.23; 0.6.1 has" in caplog.text
