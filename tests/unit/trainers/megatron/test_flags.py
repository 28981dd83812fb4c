"""Megatron's flags: those of the installed megatron-core, their spellings and values, and sizes that contradict."""

from __future__ import annotations

import dataclasses
import importlib
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from slime_trainer_megatron import installed
from slime_trainer_megatron.arguments.fields import known_fields
from slime_trainer_megatron.arguments.flags import flag_list
from slime_trainer_megatron.arguments.values import given_fields, pattern
from slime_trainer_megatron.installed import check_installed, check_version
from slime_trainer_megatron.layout import Layout

from slime_core.config import Args, load_settings
from slime_core.config.spec import flag_specs
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


# -- on slime's command line -----------------------------------------------------------------------------

IN_SCRIPTS = [
    line for line in (Path(__file__).parent / "thudm_names.txt").read_text().splitlines() if not line.startswith("#")
]


def load(*argv: str, backend: str = "megatron") -> Any:
    return load_settings([*argv, "--train-backend", backend], command="show", env={})


def test_names_of_model_files_and_launch_scripts_are_known() -> None:
    known = {*flag_specs(), *flag_list().by_name}
    assert [name for name in IN_SCRIPTS if name.replace("-", "_") not in known] == []


def test_spellings_store_the_fields_value() -> None:
    argv = (
        "--tensor-model-parallel-size 2 --sequence-parallel --norm-epsilon 1e-6 --attention-backend flash"
        " --rotary-base 1000000 --no-rope-fusion --disable-bias-linear --num-experts 8 --apply-layernorm-1p"
        " --no-check-for-nan-in-loss-and-grad --accumulate-allreduce-grads-in-fp32 --swiglu --recompute-modules mlp moe"
        " --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2 --no-initialization"
        " --decoder-last-pipeline-num-layers 3 --lr 1"
    )
    args = load(*argv.split()).args
    assert args.lr == 1
    assert args.swiglu is True
    assert given_fields(args) == {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "layernorm_epsilon": 1e-6,
        "attention_backend": "flash",
        "rotary_base": 1000000.0,
        "apply_rope_fusion": False,
        "add_bias_linear": False,
        "num_moe_experts": 8,
        "layernorm_zero_centered_gamma": True,
        "check_for_nan_in_grad": False,
        "grad_reduce_in_fp32": True,
        "recompute_modules": ["mlp", "moe"],
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.2],
        "perform_initialization": False,
        "num_layers_in_last_pipeline_stage": 3,
    }


def test_layers_are_written_as_in_scripts() -> None:
    assert pattern("[0]*3+[1]*5") == [0, 0, 0, 1, 1, 1, 1, 1]
    assert pattern("([1]*2+[0])*2") == [1, 1, 0, 1, 1, 0]
    assert given_fields(load("--moe-layer-freq", "2").args) == {"moe_layer_freq": 2}
    assert given_fields(load("--moe-layer-freq", "[0]*1+[1]*2").args) == {"moe_layer_freq": [0, 1, 1]}
    for text in ("[0]*3+5", "__import__('os')", "[1]*(2", "['a']", "[1]*10**9"):
        with pytest.raises(ArgumentTypeError, match="neither a number nor a list"):
            pattern(text)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--num-layers many", "invalid int value: 'many'"),
        ("--recompute-method all", r"invalid choice: 'all' \(choose from 'uniform', 'block'\)"),
        ("--pretrained-checkpoint x", "set --load with --finetune, or --hf-checkpoint"),
        ("--no-variable-seq-lengths", "slime sets it: .*remove it"),
        ("--spec my.models get_spec", "set --custom-model-provider-path"),
        ("--weight-decay-incr-style linear", "set --weight-decay"),
    ],
)
def test_refusals(argv: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{argv.split()[0]}.*\(flag\): .*{message}"):
        load(*argv.split())
    with pytest.raises(ConfigError, match=r"--tensor-model-paralel-size\. Did you mean --tensor-model-parallel-size"):
        load("--tensor-model-paralel-size", "2")


def test_flags_without_effect_are_told_in_one_warning() -> None:
    given = ("--log-interval 1", "--spec slime_plugins.models.glm4 get_spec", "--muon-momentum 0.9")
    (said,) = load(*" ".join(given).split(), "--variable-seq-lengths").warnings
    assert all(f"{flag} (flag)" in said for flag in (*given, "--variable-seq-lengths"))


# -- parallel sizes --------------------------------------------------------------------------------------

NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
    "embedding": "account_for_embedding_in_pipeline_split",
    "loss": "account_for_loss_in_pipeline_split",
}


def layout(num_layers: int | None = None, **flags: Any) -> Layout:
    return Layout.from_args(Args(**{NAMES.get(k, k): v for k, v in flags.items()}), num_layers)


@pytest.mark.parametrize(
    ("layers", "flags", "message"),
    [
        (None, {"tp": 0}, "--tensor-model-parallel-size 0: at least 1"),
        (None, {"vpp": 2}, "--virtual-pipeline-model-parallel-size: needs --pipeline-model-parallel-size"),
        (None, {"last": 2}, "--decoder-last-pipeline-num-layers 2: needs --pipeline-model-parallel-size"),
        (7, {"pp": 2}, "7 of the model's 7 layers cannot be spread evenly over 2 stages"),
        (8, {"pp": 2, "embedding": True}, r"9 of the model's 8 layers \(counted as 9\) cannot be spread"),
        (8, {"pp": 2, "first": 3, "vpp": 2}, "--decoder-first-pipeline-num-layers 3: not divisible into 2 chunks"),
        (8, {"pp": 2, "first": 3, "last": 5, "embedding": True}, "--account-for-embedding-in-pipeline-split"),
        (8, {"pp": 2, "num_layers_per_virtual_pipeline_stage": 3}, "8 layers over 2 stages cannot be cut into such"),
        (8, {"pp": 2, "vpp": 2, "num_layers_per_virtual_pipeline_stage": 2}, "says the same; remove one"),
    ],
)
def test_contradictions(layers: int | None, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout(layers, **flags)


def test_ranks_hold_whole_copies() -> None:
    with pytest.raises(ConfigError, match="6 ranks cannot hold whole copies of a model over 4 ranks"):
        Layout(tensor=2, pipeline=2).data_size(6)
    with pytest.raises(ConfigError, match="2 ranks cannot hold"):
        Layout(tensor=4).data_size(2)
    with pytest.raises(ConfigError, match="6 ranks cannot hold whole copies of experts over 4 ranks"):
        Layout(expert=4).data_size(6)
    assert Layout(tensor=2, expert=4, expert_tensor=1).data_size(4) == 2


@pytest.mark.parametrize(
    ("sizes", "transformer", "message"),
    [
        ({"tensor": 3}, {}, "does not divide the model's 4 attention heads"),
        ({"expert": 2, "expert_tensor": 1}, {}, "the model has no experts"),
        ({"expert": 3}, {"num_moe_experts": 8}, "does not divide the model's 8 experts"),
        ({"tensor": 2}, {"num_moe_experts": 8}, "needs --sequence-parallel with it"),
        ({"context": 2}, {"experimental_attention_variant": "gated_delta_net"}, "cannot cut gated_delta_net"),
    ],
)
def test_models_that_do_not_fit(sizes: dict[str, Any], transformer: dict[str, Any], message: str) -> None:
    model = {"num_attention_heads": 4, "num_query_groups": 2, **transformer}
    with pytest.raises(ConfigError, match=message):
        Layout(**sizes).check_model(model)
