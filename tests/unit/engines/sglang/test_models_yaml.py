"""The rules of a `--sglang-config` file by itself; each refusal with file, line and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from slime_engine_sglang import get_model_url, planned_models
from slime_engine_sglang.models_yaml import ModelEntry, read_models

from slime_core.config import Args
from slime_core.errors import ConfigError, EngineError
from tests.sweeps import sweep


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str) -> list[ModelEntry]:
    Path("m.yaml").write_text(text)
    return read_models("m.yaml", "--sglang-config 'm.yaml' (flag)")


def groups(*lines: str) -> str:
    return "sglang:\n  - name: a\n    server_groups:\n" + "".join(f"      - {{{line}}}\n" for line in lines)


BAD = {
    "models:\n  - name: a\n": "m.yaml:1: unknown key 'models'; expected one key, 'sglang', with a list of models.",
    "": "m.yaml: 'sglang' must be a list of models.",
    "sglang:\n  - model_path: /m\n": "m.yaml:2: a model needs a 'name'.",
    "sglang:\n  - name: a b\n": "m.yaml:2: name 'a b': letters, digits and . _ - only, please.",
    "sglang:\n  - name: a\n": "m.yaml:2: model 'a' needs 'server_groups', a list such as [{num_gpus: 1}].",
    "sglang:\n  - name: a\n    model-path: /x\n": "m.yaml:3: unknown key 'model-path' of a model. Did you mean",
    "sglang:\n  - name: a\n    server_groups: [{num_gpus: 1}]\n    engine_groups: [{num_gpus: 1}]\n": "m.yaml:4:",
    groups("num_gpu: 1"): "m.yaml:4: unknown key 'num_gpu' of a server group. Did you mean num_gpus?",
    groups("num_gpus: 0"): "m.yaml:4: num_gpus 0: must be greater than 0.",
    groups("num_gpus: true"): "m.yaml:4: num_gpus True: must be a valid integer.",
    groups("num_gpus: 1, worker_type: encode"): "m.yaml:4: worker_type 'encode': must be 'regular', 'prefill',",
    groups("num_gpus: 1, worker_type: prefill"): "m.yaml:2: model 'a' has prefill servers and needs decode",
    groups("num_gpus: 1, worker_type: decode", "num_gpus: 1, worker_type: prefill", "num_gpus: 1"): "m.yaml:2:",
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


# -- addresses of models ---------------------------------------------------------------------------------

ROUTERS = {"judge": ("10.0.0.1", 8001), "actor": ("::1", 8000)}


def test_url_of_a_model() -> None:
    args = Args(sglang_model_routers=ROUTERS)
    assert get_model_url(args, "judge") == "http://10.0.0.1:8001/generate"
    assert get_model_url(args, "actor", "/v1/models") == "http://[::1]:8000/v1/models"


def test_an_engine_of_one_model_need_not_publish_it() -> None:
    args = Args(sglang_router_ip="[::1]", sglang_router_port=3)
    assert get_model_url(args, "default", "/health") == "http://[::1]:3/health"
    with pytest.raises(EngineError, match="model 'default': no engine answers over HTTP"):
        get_model_url(Args(), "default")


def test_names_are_known_before_anything_runs(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "sglang:\n"
        "- {name: actor, server_groups: [{num_gpus: 1}]}\n"
        "- {name: later, server_groups: [{worker_type: placeholder, num_gpus: 1}]}\n"
        "- {name: teacher, model_path: /models/t, server_groups: [{num_gpus: 1}]}\n"
    )
    chosen = {"rollout_engine": "sglang", "sglang_config": str(file)}
    assert planned_models(Args(**chosen)) == ["actor", "teacher"]
    assert planned_models(Args(**{**chosen, "rollout_engine": "embedded"})) == []
    args = Args(**chosen, sglang_router_ip="127.0.0.1", sglang_router_port=3)
    with pytest.raises(EngineError, match="'teacher' of --sglang-config is served while --rollout-engine sglang runs"):
        get_model_url(args, "teacher")
    with pytest.raises(ConfigError, match="no model 'later' is served; there are: 'actor', 'teacher'"):
        get_model_url(args, "later")
    assert planned_models(Args(sglang_config=None)) == planned_models(Args()) == []
    with pytest.raises(ConfigError, match=r"--sglang-config '.*none.yaml'"):
        planned_models(Args(**{**chosen, "sglang_config": str(tmp_path / "none.yaml")}))
