"""The same numbers from a family's plugin and from the trainer that knows the family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slime_testing_contracts.tiny import tiny_moe_model
from slime_trainer_megatron.trainer import MegatronTrainer

from slime_core.errors import PluginNotFoundError
from slime_core.models.family import RoutedLayers, routed_layers
from tests.megatron_models import DEEPSEEK


def test_of_a_family_that_the_embedded_pair_knows() -> None:
    assert routed_layers(tiny_moe_model(), None) == RoutedLayers(3, (0, 2), 8, 2)


def test_of_a_family_that_only_megatron_has(tmp_path: Path) -> None:
    fields = {**DEEPSEEK, "model_type": "deepseek_v3", "hidden_act": "silu", "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert routed_layers(tmp_path, MegatronTrainer) == RoutedLayers(4, (1, 2, 3), 8, 4)


def test_of_a_family_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    with pytest.raises(PluginNotFoundError, match="nobody"):
        routed_layers(tmp_path, MegatronTrainer)
    with pytest.raises(PluginNotFoundError, match="nobody"):
        routed_layers(tmp_path, None)
