"""Models that SGLang would serve wrongly are refused by what their configuration says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from slime_engine_sglang.known_defects import check_model

from slime_core.errors import ConfigError


def model(directory: Path, **config: Any) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"mlp_only_layers": [0]}, "the dense layers [0]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_wrongly_served_models_are_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_model(model(tmp_path, architectures=["Qwen3MoeForCausalLM"], **config), "--hf-checkpoint 'm' (flag)")
    assert str(refused.value).startswith("--hf-checkpoint 'm' (flag): SGLang serves this model wrongly: ")
    assert said in str(refused.value)


@pytest.mark.parametrize("config", [{"mlp_only_layers": [], "decoder_sparse_step": 1}, {}])
def test_others_pass(tmp_path: Path, config: dict[str, Any]) -> None:
    check_model(model(tmp_path, architectures=["Qwen3MoeForCausalLM"], **config), "--hf-checkpoint")
    check_model(model(tmp_path, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True), "--hf-checkpoint")


@pytest.mark.parametrize(
    ("architecture", "vision", "said"),
    [
        ("LlavaForConditionalGeneration", {"model_type": "clip_vision_model"}, "no vision tower for a LLaVA"),
        ("Qwen2VLForConditionalGeneration", {"depth": 2}, 'add "in_chans": 3'),
    ],
)
def test_vision_models_that_it_does_not_start_with(
    tmp_path: Path, architecture: str, vision: dict[str, Any], said: str
) -> None:
    config = {"architectures": [architecture], "vision_config": vision}
    with pytest.raises(ConfigError, match="--hf-checkpoint: SGLang does not start with this model: ") as refused:
        check_model(model(tmp_path, **config), "--hf-checkpoint")
    assert said in str(refused.value)
    check_model(model(tmp_path, **config | {"vision_config": {"model_type": "pixtral", "in_chans": 3}}), "m")
