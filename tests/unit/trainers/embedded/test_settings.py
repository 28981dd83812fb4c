from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_core.errors import ConfigError
from slime_core.trainers.embedded.settings import TrainerSettings


def settings(**flags: Any) -> TrainerSettings:
    return TrainerSettings.from_args(SimpleNamespace(**{"hf_checkpoint": "m", **flags}))


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
        {"fp16": True},
        {"dtype": "float16"},
        {"device": "tpu"},
        {"freeze_params_name_list": ["("]},
    ],
)
def test_what_cannot_be_honoured_is_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(flags))).replace("_", "-")):
        settings(**flags)


def test_which_parameters_train() -> None:
    assert settings(freeze_params_name_list=[r"layers\.0\."]).trains("model.layers.1.mlp")
    assert not settings(freeze_params_name_list=[r"layers\.0\."]).trains("model.layers.0.mlp")
    assert settings(only_train_params_name_list=["norm"]).trains("model.norm.weight")
    assert not settings(only_train_params_name_list=["norm"]).trains("model.embed_tokens.weight")
    assert settings().trains("model.norm.weight")
