"""Models that SGLang would serve wrongly are refused by what their configuration says."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from slime_engine_sglang.known_defects import check_model

from slime_core.errors import ConfigError


def model(directory: Path, **config: Any) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


MOE, LLAVA, QWEN2_VL = ("Qwen3MoeForCausalLM", "LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration")


@pytest.mark.parametrize(
    ("architecture", "config", "said"),
    [
        (MOE, {"mlp_only_layers": [0]}, r"serves this model wrongly: .*the dense layers \[0\]"),
        (MOE, {"decoder_sparse_step": 2}, "wrongly: .*decoder_sparse_step is 2"),
        (MOE, {"tie_word_embeddings": True}, "wrongly: .*tie_word_embeddings"),
        (MOE, {"mlp_only_layers": [], "decoder_sparse_step": 1}, None),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True}, None),
        (LLAVA, {"vision_config": {"model_type": "clip_vision_model"}}, "does not start .*no vision tower for a LLaVA"),
        (LLAVA, {"vision_config": {"model_type": "pixtral"}}, None),
        (QWEN2_VL, {"vision_config": {"depth": 2}}, 'does not start .*add "in_chans": 3'),
        (QWEN2_VL, {"vision_config": {"in_chans": 3}}, None),
    ],
)
def test_models_that_sglang_serves_wrongly_are_refused(
    tmp_path: Path, architecture: str, config: dict[str, Any], said: str | None
) -> None:
    expected = pytest.raises(ConfigError, match=f"--hf-checkpoint 'm': SGLang .*{said}") if said else nullcontext()
    with expected:
        check_model(model(tmp_path, architectures=[architecture], **config), "--hf-checkpoint 'm'")
