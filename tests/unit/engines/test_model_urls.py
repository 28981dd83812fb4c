from __future__ import annotations

from pathlib import Path

import pytest
from slime_engine_sglang import get_model_url, planned_models

from slime_core.config import Args
from slime_core.errors import ConfigError, EngineError

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
