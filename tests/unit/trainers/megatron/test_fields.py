"""Megatron's flags are those of the installed megatron-core, and nothing of it is imported for them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from slime_trainer_megatron.arguments.fields import known_fields

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


def test_types() -> None:
    found = known_fields().fields
    row = found["moe_layer_freq"]
    assert (row.kind, row.shape) == ("int", "either")
    row = found["recompute_modules"]
    assert (row.kind, row.shape) == ("str", "list")
    row = found["attention_backend"]
    assert (row.kind, row.choices, row.default) == ("str", ("flash", "fused", "unfused", "local", "auto"), "auto")
    assert found["recompute_method"].choices == ("uniform", "block")
    assert found["initial_loss_scale"].default == 2**32
    assert found["layernorm_epsilon"].names == ("norm-epsilon",)
    assert found["overlap_param_gather"].owners == ("optimizer", "ddp")
    assert found["q_lora_rank"].owners == ("mla",)


def test_reading_flags_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import json, sys; from slime_core.cli.main import main; from slime_core.config import load_settings;"
        " seen = lambda: sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'megatron', 'transformers'});"
        " listed = lambda: 'slime_trainer_megatron.arguments.fields' in sys.modules;"
        " load_settings(['--lr', '1'], command='show', env={}); before = listed();"
        " s = load_settings(['--tensor-model-parallel-size', '2', '--train-backend', 'megatron'], command='show',"
        " env={}); print(json.dumps([before, listed(), seen(), s.args.tensor_model_parallel_size]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert json.loads(out) == [False, True, [], 2]
