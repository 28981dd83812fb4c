"""Megatron's flags are those of the installed megatron-core, and nothing of it is imported for them."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from slime_trainer_megatron import installed
from slime_trainer_megatron.arguments.fields import known_fields
from slime_trainer_megatron.installed import check_installed, check_version

from slime_core.errors import ConfigError

CONFIGS: dict[str, Any] = {
    "transformer": TransformerConfig,
    "mla": MLATransformerConfig,
    "optimizer": OptimizerConfig,
    "ddp": DistributedDataParallelConfig,
}
NO_FLAGS = {
    "_cpu_offloading_context", "activation_func", "autocast_dtype", "embedding_init_method", "exp_avg_dtype",
    "exp_avg_sq_dtype", "finalize_model_grads_func", "grad_scale_func", "grad_sync_func", "init_method",
    "main_grads_dtype", "main_params_dtype", "no_sync_func", "output_layer_init_method", "param_sync_func",
    "params_dtype", "pipeline_dtype", "quant_recipe", "timers",
}  # fmt: skip
"""Functions, dtypes and objects."""


def test_every_field_of_the_installed_classes_is_there_but_what_nobody_can_type() -> None:
    found = {field.name for kind in CONFIGS.values() for field in dataclasses.fields(kind)}
    assert found - set(known_fields().fields) == NO_FLAGS
    assert set(known_fields().fields) <= found


def test_owners_and_defaults_are_those_of_the_classes() -> None:
    for owner, kind in CONFIGS.items():
        own = {field.name: field.default for field in dataclasses.fields(kind)}
        for name, field in known_fields().fields.items():
            if owner in field.owners:
                assert name in own
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    for name, field in known_fields().fields.items():
        if field.owners[0] == "transformer" and defaults[name] is not dataclasses.MISSING:
            assert field.default == getattr(defaults[name], "name", defaults[name]), name


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed()
    check_version()
    refused = r"megatron-core 0\.17\.0 .*only 0\.16\.\*; .*pip install"
    monkeypatch.setattr(importlib.import_module("megatron.core.package_info"), "__version__", "0.17.0")
    with pytest.raises(ConfigError, match=refused):
        check_version()
    monkeypatch.setattr(installed.runpy, "run_path", lambda file: {"__version__": "0.17.0"})
    with pytest.raises(ConfigError, match=refused):
        check_installed()
