"""Which numbers of a `config.json` a preset contradicts."""

from __future__ import annotations

from typing import Any

from slime_commands.models.contradictions import contradictions
from slime_commands.models.presets import find_preset, model_presets
from transformers import AutoConfig

from tests.sweeps import sweep

PRESETS = model_presets()


@sweep("name", list(PRESETS))
def test_its_own_config_has_none(name: str) -> None:
    assert contradictions(PRESETS[name], PRESETS[name].config) == []


@sweep("name", [n for n, p in PRESETS.items() if p.model_type not in ("kimi_k2", "mimo")])
def test_nor_has_the_file_that_transformers_writes(name: str) -> None:
    config = dict(PRESETS[name].config)
    written = AutoConfig.for_model(config.pop("model_type"), **config).to_dict()
    assert contradictions(PRESETS[name], written) == []


def changed(name: str, **keys: Any) -> list[str]:
    preset = find_preset(name)
    text = preset.config.get("text_config")
    hf = {**preset.config, "text_config": {**text, **keys}} if text else {**preset.config, **keys}
    return [found.text for found in contradictions(preset, hf)]


def test_each_difference_is_named_by_its_flag() -> None:
    assert changed("qwen3-4B", num_hidden_layers=28, vocab_size=7) == [
        "--num-layers: 36 in the preset, 28 in config.json",
        "--vocab-size: 151936 in the preset, 7 in config.json",
    ]
    assert changed("qwen3-4B", rope_theta=5e6) == ["--rotary-base: 1000000.0 in the preset, 5000000.0 in config.json"]
    assert changed("qwen3-30B-A3B", num_experts=64, num_experts_per_tok=4) == [
        "--num-experts: 128 in the preset, 64 in config.json",
        "--moe-router-topk: 8 in the preset, 4 in config.json",
    ]
    assert changed("deepseek-v3", q_lora_rank=None) == ["--q-lora-rank: 1536 in the preset, none in config.json"]
    assert changed("qwen3.5-4B", linear_num_value_heads=48) == [
        "--linear-num-value-heads: 32 in the preset, 48 in config.json"
    ]
    (scaling,) = changed("llama3.1-8B-Instruct", rope_scaling=None)
    assert scaling.startswith("--use-rope-scaling: rope_type llama3 factor 8.0 low_freq_factor 1.0")


def test_either_spelling_of_the_rotary_settings_is_read() -> None:
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    hf = {k: v for k, v in find_preset("glm4-9B").config.items() if "rope" not in k and "rotary" not in k} | new
    assert contradictions(find_preset("glm4-9B"), hf) == []
    hf["rope_parameters"] = {"rope_type": "default", "rope_theta": 2e4}
    assert [c.flag for c in contradictions(find_preset("glm4-9B"), hf)] == ["rotary-base"]
