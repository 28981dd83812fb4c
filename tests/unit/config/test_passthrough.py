from __future__ import annotations

from typing import Any

import pytest

from slime_core.config import ForeignFlag, ForeignFlags, load_settings
from slime_core.config.flags import parse_flags
from slime_core.config.passthrough import BUILT_IN, convert
from slime_core.errors import ConfigError


def foreign(*argv: str) -> dict[str, Any]:
    return {name: entry.value for name, entry in parse_flags(argv, BUILT_IN).foreign.items()}


def test_megatron_flags_are_typed_attributes() -> None:
    argv = (
        "--tensor-model-parallel-size 2 --sequence-parallel --norm-epsilon 1e-6 --attention-backend flash"
        " --spec slime_plugins.models.glm4 get_spec --rotary-base 1000000 --no-rope-fusion --lr 1"
    )
    assert foreign(*argv.split()) == {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "norm_epsilon": 1e-6,
        "attention_backend": "flash",
        "spec": ["slime_plugins.models.glm4", "get_spec"],
        "rotary_base": 1000000,
        "no_rope_fusion": True,
    }


def test_prefixed_flags_take_what_follows() -> None:
    argv = (
        "--sglang-enable-metrics --sglang-mem-fraction-static 0.8 --lr 1 --sglang-cuda-graph-bs 1 2 4 --router-policy=x"
    )
    assert foreign(*argv.split(), "--sglang-json-model-override-args", '{"a": 1}', "--sglang-x", "-1") == {
        "sglang_enable_metrics": True,
        "sglang_mem_fraction_static": 0.8,
        "sglang_cuda_graph_bs": [1, 2, 4],
        "router_policy": "x",
        "sglang_json_model_override_args": '{"a": 1}',
        "sglang_x": -1,
    }


def test_our_own_sglang_settings_are_not_passed_through() -> None:
    parsed = parse_flags(["--sglang-server-concurrency", "4", "--sglang-router-ip", "h"], BUILT_IN)
    assert parsed.foreign == {}
    assert sorted(parsed.values) == ["sglang_router_ip", "sglang_server_concurrency"]


def test_a_backend_brings_its_own_list_and_then_nothing_is_unused() -> None:
    mine = ForeignFlags("Mine", (ForeignFlag("depth", "int"),), prefixes=("mine-",), used_by=("fast",))
    argv = ["--depth", "3", "--mine-x", "1"]
    s = load_settings([*argv, "--train-backend", "fast"], command="show", env={}, foreign=(mine,))
    assert (s.args.depth, s.args.mine_x, s.warnings) == (3, 1, [])
    s = load_settings(argv, command="show", env={}, foreign=(mine,))
    assert len(s.warnings) == 1
    with pytest.raises(ConfigError, match="unknown flag --depth"):
        load_settings(argv, command="show", env={}, foreign=())


@pytest.mark.parametrize(
    ("kind", "raw", "message"),
    [
        ("int", "1.5", "expected a whole number"),
        ("int", 1.5, "expected a whole number"),
        ("float", "x", "expected a number"),
        ("int", True, "expected a number"),
        ("switch", 1, "expected true or false"),
    ],
)
def test_convert_says_what_is_expected(kind: Any, raw: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        convert(ForeignFlag("x", kind), raw)


def test_wrong_value_on_the_command_line() -> None:
    with pytest.raises(ConfigError) as caught:
        foreign("--num-layers", "many")
    assert str(caught.value) == "--num-layers 'many' (flag): expected a whole number"
