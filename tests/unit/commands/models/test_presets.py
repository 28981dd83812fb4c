"""Presets against two sources of their own: THUDM/slime's scripts, and the classes of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from slime_commands.models.count import active_parameters, parameters
from slime_commands.models.presets import model_presets
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from slime_core.models.config import load_model_config
from slime_core.models.hf_io import write_config
from tests.sweeps import sweep

PRESETS = model_presets()
every = sweep("name", PRESETS)

SCRIPTS = """
qwen2.5-0.5B             24  896  4864  14 2 -   151936 1e6
qwen2.5-1.5B             28  1536 8960  12 2 -   151936 1e4
qwen2.5-3B               36  2048 11008 16 2 -   151936 1e6
qwen2.5-7B               28  3584 18944 28 4 -   152064 1e6
qwen2.5-32B              64  5120 27648 40 8 -   152064 1e6
qwen3-0.6B               28  1024 3072  16 8 128 151936 1e6
qwen3-1.7B               28  2048 6144  16 8 128 151936 1e6
qwen3-4B                 36  2560 9728  32 8 128 151936 1e6
qwen3-4B-Instruct-2507   36  2560 9728  32 8 128 151936 5e6
qwen3-8B                 36  4096 12288 32 8 128 151936 1e6
qwen3-14B                40  5120 17408 40 8 128 151936 1e6
qwen3-32B                64  5120 25600 64 8 128 151936 1e6
qwen3-30B-A3B            48  2048 6144  32 4 128 151936 1e6
qwen3-235B-A22B          94  4096 12288 64 4 128 151936 1e6
qwen3-next-80B-A3B       48  2048 5120  16 2 256 151936 1e7 25
qwen3.5-0.8B             24  1024 3584  8  2 256 248320 1e7 25
qwen3.5-4B               32  2560 9216  16 4 256 248320 1e7 25
qwen3.5-9B               32  4096 12288 16 4 256 248320 1e7 25
qwen3.5-27B              64  5120 17408 24 4 256 248320 1e7 25
qwen3.5-35B-A3B          40  2048 512   16 2 256 248320 1e7 25
qwen3.5-35B-A3B-vl       40  2048 512   16 2 256 248320 1e7 25
glm4-9B                  40  4096 13696 32 2 -   151552 1e4 50
glm4-32B                 64  6144 23040 48 8 -   151552 1e4 50
glm4.5-106B-A12B         46  4096 10944 96 8 128 151552 1e6 50
glm4.5-355B-A32B         92  5120 12288 96 8 128 151552 1e6 50
glm4.6-355B-A32B         92  5120 12288 96 8 128 151552 1e6 50
glm4.7-355B-A32B         92  5120 12288 96 8 128 151552 1e6 50
glm4.7-30B-A3B           47  2048 10240 20 MLA 192 154880 1e6
glm5-744B-A40B           78  6144 12288 64 MLA 192 154880 1e6
glm5.2-744B-A40B         78  6144 12288 64 MLA 192 154880 8e6
deepseek-v3              61  7168 18432 128 MLA 128 129280 1e4
deepseek-v3.1            61  7168 18432 128 MLA 128 129280 1e4
deepseek-r1              61  7168 18432 128 MLA 128 129280 1e4
deepseek-v3-5layer       5   7168 18432 128 MLA 128 129280 1e4
deepseek-v3-20layer      20  7168 18432 128 MLA 128 129280 1e4
kimi-k2                  61  7168 18432 64 MLA 64  163840 5e4
kimi-k2-thinking         61  7168 18432 64 MLA 64  163840 5e4
moonlight                27  2048 11264 16 MLA 128 163840 5e4
llama3-8B                32  4096 14336 32 8 128 128256 5e5
llama3-70B               80  8192 28672 64 8 128 128256 5e5
llama3.1-8B-Instruct     32  4096 14336 32 8 128 128256 5e5
llama3.2-3B-Instruct     28  3072 8192  24 8 128 128256 5e5
llama3.2-3B-Instruct-amd 28  3072 8192  24 8 128 128256 5e5
mimo-7B-rl               36  4096 11008 32 8 -   151680 6.4e5
minimax-m2               62  3072 1536  48 8 128 200064 5e6 50
"""
"""Name, layers, hidden, ffn, heads, kv groups, kv channels, vocabulary, rotary base and percent of every script;
of models without one, those of their published config.json."""
ALIKE = {"deepseek-v3.1": "deepseek-v3", "deepseek-r1": "deepseek-v3"}
ALIKE |= {f"glm4.{minor}-355B-A32B": "glm4.5-355B-A32B" for minor in (6, 7)}
"""Model -> the one whose architecture it has."""

DIFFERENT: Mapping[tuple[str, str], Any] = {
    # The script's 1e4 is DeepSeek-R1-Distill-Qwen-1.5B's; Qwen/Qwen2.5-1.5B has the base of all Qwen2.5.
    ("qwen2.5-1.5B", "rope_base"): 1e6,
    # GLM-4-32B-0414 and GLM-Z1-32B-0414 have 61 layers with 2 key-value heads, which also gives their 32.6B parameters.
    ("glm4-32B", "layers"): 61,
    ("glm4-32B", "kv_groups"): 2,
    # For latent attention Megatron does not use kv-channels; the scripts put the size of the rotated part there.
    ("kimi-k2", "head_size"): 128,
    ("kimi-k2-thinking", "head_size"): 128,
}
"""Where the published checkpoint is not what the script says."""

EXPERTS = {
    "qwen3-30B-A3B": (128, 8, 768, 0, 0, "softmax", 1, 1, 1.0),
    "qwen3-235B-A22B": (128, 8, 1536, 0, 0, "softmax", 1, 1, 1.0),
    "qwen3-next-80B-A3B": (512, 10, 512, 512, 0, "softmax", 1, 1, 1.0),
    "qwen3.5-35B-A3B": (256, 8, 512, 512, 0, "softmax", 1, 1, 1.0),
    "qwen3.5-35B-A3B-vl": (256, 8, 512, 512, 0, "softmax", 1, 1, 1.0),
    "glm4.5-106B-A12B": (128, 8, 1408, 1408, 1, "sigmoid", 1, 1, 1.0),
    "glm4.5-355B-A32B": (160, 8, 1536, 1536, 3, "sigmoid", 1, 1, 2.5),
    "glm4.7-30B-A3B": (64, 4, 1536, 1536, 1, "sigmoid", 1, 1, 1.8),
    "glm5-744B-A40B": (256, 8, 2048, 2048, 3, "sigmoid", 1, 1, 2.5),
    "glm5.2-744B-A40B": (256, 8, 2048, 2048, 3, "sigmoid", 1, 1, 2.5),
    "deepseek-v3": (256, 8, 2048, 2048, 3, "sigmoid", 8, 4, 2.5),
    "deepseek-v3-5layer": (256, 8, 2048, 2048, 3, "sigmoid", 8, 4, 2.5),
    "deepseek-v3-20layer": (256, 8, 2048, 2048, 3, "sigmoid", 8, 4, 2.5),
    "kimi-k2": (384, 8, 2048, 2048, 1, "sigmoid", 1, 1, 2.827),
    "kimi-k2-thinking": (384, 8, 2048, 2048, 1, "sigmoid", 1, 1, 2.827),
    "moonlight": (64, 6, 1408, 2816, 1, "sigmoid", 1, 1, 2.446),
    "minimax-m2": (256, 8, 1536, 0, 0, "sigmoid", 1, 1, 1.0),
}
EXPERTS |= {name: EXPERTS[other] for name, other in ALIKE.items()}
"""Number, per token, ffn, shared, first dense layers, score function, groups, groups per token, scaling."""

LATENT = {
    "glm4.7-30B-A3B": (768, 512, 192, 64, 256),
    "glm5-744B-A40B": (2048, 512, 192, 64, 256),
    "glm5.2-744B-A40B": (2048, 512, 192, 64, 256),
    "deepseek-v3": (1536, 512, 128, 64, 128),
    "deepseek-v3-5layer": (1536, 512, 128, 64, 128),
    "deepseek-v3-20layer": (1536, 512, 128, 64, 128),
    "kimi-k2": (1536, 512, 128, 64, 128),
    "kimi-k2-thinking": (1536, 512, 128, 64, 128),
    "moonlight": (None, 512, 128, 64, 128),
}
LATENT |= {name: LATENT[other] for name, other in ALIKE.items() if other in LATENT}
"""Ranks of queries and of keys and values, sizes of the plain and the rotated part of a key, and of a value."""

QKV_BIAS = {"glm4-9B", "mimo-7B-rl"} | {n for n in PRESETS if "qwen2.5" in n or (n[:4] == "glm4" and "B-A" in n)}
QKV_BIAS -= {"glm4.7-30B-A3B"}
TIED = {
    "qwen2.5-0.5B", "qwen2.5-1.5B", "qwen2.5-3B", "qwen3-0.6B", "qwen3-1.7B", "qwen3-4B", "qwen3-4B-Instruct-2507",
    "qwen3.5-0.8B", "qwen3.5-4B", "llama3.2-3B-Instruct", "llama3.2-3B-Instruct-amd",
}  # fmt: skip
NO_QK_NORM = {"glm4-9B", "glm4-32B", "glm4.5-106B-A12B", "mimo-7B-rl"} | {
    n for n in PRESETS if n.startswith(("qwen2.5", "llama"))
}
SCALING = {"deepseek-v3": 40, "kimi-k2": 32, "kimi-k2-thinking": 64, "llama3.1-8B-Instruct": 8}
SCALING |= {"llama3.2-3B-Instruct": 32, "llama3.2-3B-Instruct-amd": 32}
SCALING |= dict.fromkeys(("deepseek-v3-5layer", "deepseek-v3-20layer", "deepseek-v3.1", "deepseek-r1"), 40)


def table() -> dict[str, dict[str, Any]]:
    rows = {}
    for line in SCRIPTS.split("\n")[1:-1]:
        name, *cells = line.split()
        layers, hidden, ffn, heads, kv, channels, vocabulary, base, *percent = cells
        rows[name] = {
            "layers": int(layers),
            "hidden_size": int(hidden),
            "ffn_size": int(ffn),
            "heads": int(heads),
            "kv_groups": int(heads if kv == "MLA" else kv),
            "head_size": int(hidden) // int(heads) if channels == "-" else int(channels),
            "vocab_size": int(vocabulary),
            "rope_base": float(base),
            "rope_percent": float(percent[0]) / 100 if percent else 1.0,
        }
    return rows


def test_every_script_has_a_preset() -> None:
    assert len(PRESETS) == 45
    assert set(table()) == set(PRESETS)


@every
def test_numbers_are_the_scripts(name: str) -> None:
    n = PRESETS[name].numbers
    expected = table()[name] | {field: value for (model, field), value in DIFFERENT.items() if model == name}
    assert {field: getattr(n, field) for field in expected} == expected
    assert (n.qkv_bias, n.qk_norm, n.tied) == (name in QKV_BIAS, name not in NO_QK_NORM, name in TIED)
    assert (n.rope_scaling["factor"] if n.rope_scaling else None) == SCALING.get(name)
    experts, latent = n.experts, n.latent
    assert (experts is None) == (name not in EXPERTS)
    if experts is not None:
        assert (
            experts.number, experts.per_token, experts.ffn_size, experts.shared_size, experts.first_dense,
            experts.score_function, experts.groups, experts.groups_per_token, experts.scaling,
        ) == EXPERTS[name]  # fmt: skip
    assert (dataclasses.astuple(latent) if latent else None) == LATENT.get(name)


# -- transformers ----------------------------------------------------------------------------------------

STAND_IN = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Families whose code is on the hub: the class that it is made from."""
OLD_SPELLING = {"rope_theta", "rope_scaling", "partial_rotary_factor", "full_attention_interval", "rotary_dim"}
OLD_SPELLING |= {"index_topk_freq", "index_skip_topk_offset"}
"""Keys that the classes turn into fields of other names."""
IN_THE_CODE = {
    "deepseek_v3": {"scoring_func", "topk_method", "moe_layer_freq"},
    "glm4_moe": {"head_dim"},
    "glm4_moe_lite": {"first_k_dense_replace", "num_nextn_predict_layers"},
    "glm_moe_dsa": {"num_nextn_predict_layers"},
    "minimax_m2": {"scoring_func", "use_routing_bias", "use_qk_norm", "qk_norm_type", "shared_intermediate_size"},
    "qwen2": {"head_dim", "attention_bias", "num_nextn_predict_layers"},
    "qwen3_moe": {"head_dim"},
}
"""Keys of published files without a field: the model's code reads them as attributes, or does one thing only."""


def hf_config(name: str) -> tuple[str, dict[str, Any], Any]:
    """Model type, the language model's part of the preset, and transformers' object made from it."""
    text = dict(PRESETS[name].config.get("text_config", PRESETS[name].config))
    family = text.pop("model_type")
    family = STAND_IN.get(family, family)
    return family, text, AutoConfig.for_model(family, **text)


@every
def test_the_class_of_transformers_knows_every_key(name: str) -> None:
    family, text, config = hf_config(name)
    known = {field.name for field in dataclasses.fields(config)} | {
        *config.attribute_map,
        *config.attribute_map.values(),
    }
    assert set(text) - known - OLD_SPELLING == IN_THE_CODE.get(family, set()) & set(text)


@every
def test_the_class_of_transformers_reads_the_same_numbers(name: str) -> None:
    _, _, config = hf_config(name)
    n = PRESETS[name].numbers
    assert config.num_hidden_layers == n.layers
    assert config.hidden_size == n.hidden_size
    assert config.num_attention_heads == n.heads
    assert config.num_key_value_heads == n.kv_groups
    assert config.vocab_size == n.vocab_size
    assert config.rms_norm_eps == n.norm_epsilon
    assert config.tie_word_embeddings == n.tied
    rope = config.rope_parameters
    assert rope["rope_theta"] == n.rope_base
    assert rope.get("partial_rotary_factor", 1.0) == n.rope_percent
    assert rope["rope_type"] == (n.rope_scaling["rope_type"] if n.rope_scaling else "default")
    if n.rope_scaling:
        assert rope["factor"] == n.rope_scaling["factor"]
    family = PRESETS[name].model_type
    if family not in STAND_IN:
        classes = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
        assert PRESETS[name].architecture in [found.get(family) for found in classes]
    if n.indexer:
        assert config.indexer_types.count("full") == n.indexer.layers
    if n.delta_net:
        assert config.layer_types.count("full_attention") == n.softmax_layers


@pytest.mark.slow
@every
def test_parameters_are_those_of_the_model_that_transformers_builds(name: str) -> None:
    _, _, config = hf_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert parameters(PRESETS[name].numbers) == sum(p.numel() for p in model.parameters())


PUBLISHED = {
    "qwen2.5-0.5B": 0.49, "qwen2.5-1.5B": 1.54, "qwen2.5-3B": 3.09, "qwen2.5-7B": 7.61, "qwen2.5-32B": 32.5,
    "qwen3-0.6B": 0.6, "qwen3-1.7B": 1.7, "qwen3-4B": 4.0, "qwen3-8B": 8.2, "qwen3-14B": 14.8, "qwen3-32B": 32.8,
    "qwen3-30B-A3B": 30.5, "qwen3-235B-A22B": 235, "qwen3-next-80B-A3B": 80, "qwen3.5-9B": 9, "qwen3.5-27B": 27,
    "qwen3.5-35B-A3B": 35, "glm4.5-106B-A12B": 106, "glm4.5-355B-A32B": 355, "glm4.7-30B-A3B": 30,
    "glm5-744B-A40B": 744, "glm5.2-744B-A40B": 744, "deepseek-v3": 671, "moonlight": 16, "kimi-k2": 1040,
    "llama3.1-8B-Instruct": 8.03, "llama3.2-3B-Instruct": 3.21, "minimax-m2": 230, "glm4-32B": 32.6,
}  # fmt: skip
"""Billions, as model cards and papers say."""


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_parameters_are_the_published_ones(name: str) -> None:
    assert parameters(PRESETS[name].numbers) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.02)


ACTIVE = {"qwen3-30B-A3B": 3.3, "qwen3-235B-A22B": 22, "deepseek-v3": 37, "kimi-k2": 32.6, "moonlight": 2.9}


@pytest.mark.parametrize("name", list(ACTIVE))
def test_active_parameters_are_the_published_ones(name: str) -> None:
    assert active_parameters(PRESETS[name].numbers) / 1e9 == pytest.approx(ACTIVE[name], rel=0.02)


@pytest.mark.parametrize("name", [n for n, p in PRESETS.items() if p.model_type in ("llama", "qwen2", "qwen3")])
def test_the_embedded_trainers_family_reads_it(name: str, tmp_path: Any) -> None:
    n = PRESETS[name].numbers
    write_config(tmp_path, PRESETS[name].config)
    config = load_model_config(tmp_path)
    assert (config.num_layers, config.hidden_size, config.head_dim) == (n.layers, n.hidden_size, n.head_size)
    assert (config.num_kv_heads, config.qkv_bias, config.qk_norm) == (n.kv_groups, n.qkv_bias, n.qk_norm)
    assert (config.rope_theta, config.tie_word_embeddings) == (n.rope_base, n.tied)
