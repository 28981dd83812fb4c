"""Megatron's flags on slime's command line: spellings, values, and what is said about those that do not act."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest
from slime_trainer_megatron.arguments.flags import flag_list
from slime_trainer_megatron.arguments.values import given_fields, pattern

from slime_core.config import load_settings
from slime_core.config.spec import flag_specs
from slime_core.errors import ConfigError

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
