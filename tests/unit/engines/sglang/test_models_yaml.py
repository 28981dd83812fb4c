"""The rules of a `--sglang-config` file by itself; each refusal with file, line and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from slime_engine_sglang.models_yaml import ModelEntry, read_models

from slime_core.errors import ConfigError
from tests.sweeps import sweep


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str) -> list[ModelEntry]:
    Path("m.yaml").write_text(text)
    return read_models("m.yaml", "--sglang-config 'm.yaml' (flag)")


def test_two_models_with_groups() -> None:
    actor, judge = read(
        "sglang:\n"
        "  - name: actor\n"
        "    num_gpus_per_engine: 2\n"
        "    server_groups:\n"
        "      - {worker_type: prefill, num_gpus: 4, num_gpus_per_engine: 1}\n"
        "      - {worker_type: decode, num_gpus: 4, overrides: {mem_fraction_static: 0.8}}\n"
        "      - {worker_type: encoder, num_gpus: 2}\n"
        "      - {worker_type: placeholder, num_gpus: 3}\n"
        "  - name: judge-7b.v2\n"
        "    model_path: /j\n"
        "    update_weights: false\n"
        "    engine_groups:\n"
        "      - num_gpus: 8\n"
    )
    assert (actor.model_path, actor.update_weights, actor.num_gpus_per_engine, actor.where) == (
        None,
        None,
        2,
        "m.yaml:2",
    )
    assert [(g.worker_type, g.num_gpus, g.num_gpus_per_engine, g.overrides, g.where) for g in actor.server_groups] == [
        ("prefill", 4, 1, {}, "m.yaml:5"),
        ("decode", 4, None, {"mem_fraction_static": 0.8}, "m.yaml:6"),
        ("encoder", 2, None, {}, "m.yaml:7"),
        ("placeholder", 3, None, {}, "m.yaml:8"),
    ]
    assert (judge.name, judge.model_path, judge.update_weights) == ("judge-7b.v2", "/j", False)
    assert [(g.worker_type, g.num_gpus) for g in judge.server_groups] == [("regular", 8)]


def test_model_path_among_overrides_is_the_models() -> None:
    (model,) = read(
        "sglang:\n  - name: a\n    server_groups:\n"
        "      - {worker_type: prefill, num_gpus: 1, overrides: {model_path: /x, page_size: 1}}\n"
        "      - {worker_type: decode, num_gpus: 1, overrides: {model_path: /x}}\n"
    )
    assert model.model_path == "/x"
    assert [g.overrides for g in model.server_groups] == [{"page_size": 1}, {}]


def groups(*lines: str) -> str:
    return "sglang:\n  - name: a\n    server_groups:\n" + "".join(f"      - {{{line}}}\n" for line in lines)


BAD = {
    "models:\n  - name: a\n": "m.yaml:1: unknown key 'models'; expected one key, 'sglang', with a list of models.",
    "": "m.yaml: 'sglang' must be a list of models.",
    "sglang: []\n": "m.yaml:1: 'sglang' must be a list of models.",
    "sglang: {name: a}\n": "m.yaml:1: 'sglang' must be a list of models.",
    "sglang:\n  - a\n": "m.yaml:2: 'sglang' must be a list of models.",
    "sglang:\n  - model_path: /m\n": "m.yaml:2: a model needs a 'name'.",
    "sglang:\n  - name: 3\n": "m.yaml:2: name 3: must be a valid string.",
    "sglang:\n  - name: a b\n": "m.yaml:2: name 'a b': letters, digits and . _ - only, please.",
    "sglang:\n  - name: a\n": "m.yaml:2: model 'a' needs 'server_groups', a list such as [{num_gpus: 1}].",
    "sglang:\n  - name: a\n    model-path: /x\n": "m.yaml:3: unknown key 'model-path' of a model. Did you mean",
    "sglang:\n  - name: a\n    update_weights: no\n": "m.yaml:3: update_weights 'no': must be a valid boolean.",
    "sglang:\n  - name: a\n    server_groups: [{num_gpus: 1}]\n    engine_groups: [{num_gpus: 1}]\n": "m.yaml:4:",
    groups("num_gpu: 1"): "m.yaml:4: unknown key 'num_gpu' of a server group. Did you mean num_gpus?",
    groups("worker_type: regular"): "m.yaml:4: a server group needs 'num_gpus'.",
    groups("num_gpus: 0"): "m.yaml:4: num_gpus 0: must be greater than 0.",
    groups("num_gpus: two"): "m.yaml:4: num_gpus 'two': must be a valid integer.",
    groups("num_gpus: true"): "m.yaml:4: num_gpus True: must be a valid integer.",
    groups("num_gpus: 2", "num_gpus: 2, num_gpus_per_engine: -1"): "m.yaml:5: num_gpus_per_engine -1: must be",
    groups("num_gpus: 1, worker_type: encode"): "m.yaml:4: worker_type 'encode': must be 'regular', 'prefill',",
    groups("num_gpus: 1, overrides: [a]"): "m.yaml:4: overrides ['a']: must be a valid dictionary.",
    groups("num_gpus: 1, worker_type: prefill"): "m.yaml:2: model 'a' has prefill servers and needs decode",
    groups("num_gpus: 1, worker_type: decode"): "m.yaml:2: model 'a' has decode servers and needs prefill",
    groups("num_gpus: 1, worker_type: decode", "num_gpus: 1, worker_type: prefill", "num_gpus: 1"): "m.yaml:2:",
    groups("num_gpus: 1, worker_type: encoder", "num_gpus: 1, worker_type: placeholder"): "m.yaml:2: model 'a'",
    groups("num_gpus: 1, worker_type: placeholder"): "m.yaml: every server group is a placeholder; nothing would",
    groups("num_gpus: 1", "num_gpus: 1, worker_type: placeholder, overrides: {a: 1}"): "m.yaml:5: a placeholder",
    groups("num_gpus: 1, overrides: {model_path: /x}", "num_gpus: 1, overrides: {model_path: /y}"): "m.yaml:5:",
    groups("num_gpus: 1") + "  - name: a\n    server_groups: [{num_gpus: 1}]\n": "m.yaml:5: model 'a' is already",
    "sglang:\n  - {name: a, name: b}\n": "m.yaml:2: 'name' is already set in line 2",
}


@sweep("text", BAD)
def test_refused_with_file_and_line(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(text)
    assert str(raised.value).startswith(BAD[text])


def test_a_file_that_is_not_there_is_cited() -> None:
    with pytest.raises(ConfigError) as raised:
        read_models("none.yaml", "--sglang-config 'none.yaml' (run.yaml:3)")
    assert str(raised.value) == "--sglang-config 'none.yaml' (run.yaml:3): no such file"
