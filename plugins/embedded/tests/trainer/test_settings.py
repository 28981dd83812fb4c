from __future__ import annotations

from typing import Any

import pytest
import torch
from slime_embedded.trainer.settings import TrainerSettings

from slime_core.config import Args
from slime_core.errors import ConfigError


def settings(**flags: Any) -> TrainerSettings:
    return TrainerSettings.from_args(Args(**{"hf_checkpoint": "m", **flags}))


@pytest.mark.parametrize(
    ("flags", "reference"),
    [
        ({}, None),
        ({"kl_coef": 0.0, "use_kl_loss": False, "ref_load": "r"}, None),
        ({"kl_coef": 0.1}, "m"),
        ({"use_kl_loss": True, "ref_load": "r"}, "r"),
    ],
)
def test_a_reference_is_loaded_only_when_kl_is_used(flags: dict[str, Any], reference: str | None) -> None:
    assert settings(**flags).ref_checkpoint == reference


def test_compute_dtype() -> None:
    cpu = torch.device("cpu")
    assert settings().compute_dtype(cpu) == torch.float32
    assert settings(bf16=True).compute_dtype(cpu) == torch.bfloat16
    assert settings(dtype="bfloat16").compute_dtype(cpu) == torch.bfloat16


@pytest.mark.parametrize(
    "flags",
    [
        {"recompute_granularity": "selective"},
        {"freeze_params_name_list": ["("]},
    ],
)
def test_what_cannot_be_honoured_is_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(flags))).replace("_", "-")):
        settings(**flags)


PARAMETERS = [
    ("model.embed_tokens.weight", "embedding.word_embeddings.weight"),
    ("model.layers.0.mlp.up_proj.weight", "decoder.layers.0.mlp.linear_fc1.weight"),
    ("model.layers.0.post_attention_layernorm.weight", "decoder.layers.0.pre_mlp_layernorm.weight"),
    ("model.layers.1.mlp.up_proj.weight", "decoder.layers.1.mlp.linear_fc1.weight"),
]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"freeze_params_name_list": [r"layers\.0\."]}, {0, 3}),
        ({"only_train_params_name_list": ["norm", "embed"]}, {0, 2}),
        ({"only_train_params_name_list": ["mlp"]}, {1, 3}),  # which Megatron's name of a norm has, too
        ({"only_train_params_name_list": ["pre_mlp", "word_emb"]}, {0, 2}),
        ({"freeze_params_name_list": ["linear_fc1", r"^model\.embed"]}, {2}),
    ],
)
def test_which_parameters_train(flags: dict[str, Any], expected: set[int]) -> None:
    assert settings(**flags).trained(PARAMETERS) == ({PARAMETERS[index][0] for index in expected}, [])
