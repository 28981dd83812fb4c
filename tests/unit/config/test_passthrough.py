from __future__ import annotations

from typing import Any

import pytest

from slime_core.config import ForeignFlag, ForeignFlags, load_settings
from slime_core.config.flags import parse_flags
from slime_core.config.foreign import find_owners, resolve
from slime_core.config.passthrough import BUILT_IN
from slime_core.errors import ConfigError

OWNERS = find_owners([], {})[0]
OPEN = ForeignFlags("Mine", prefixes=("mine-",))


def foreign(*argv: str, owners: tuple[ForeignFlags, ...] = OWNERS) -> dict[str, Any]:
    given = parse_flags(argv, owners).foreign
    return {name: entry.value for name, entry in resolve(given, owners, {}).items()}


def test_megatron_flags_are_typed_attributes() -> None:
    argv = (
        "--tensor-model-parallel-size 2 --sequence-parallel --norm-epsilon 1e-6 --attention-backend flash"
        " --spec slime_plugins.models.glm4 get_spec --rotary-base 1000000 --no-rope-fusion --lr 1"
    )
    assert foreign(*argv.split(), owners=BUILT_IN) == {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "norm_epsilon": 1e-6,
        "attention_backend": "flash",
        "spec": ["slime_plugins.models.glm4", "get_spec"],
        "rotary_base": 1000000,
        "no_rope_fusion": True,
    }


def test_prefixed_flags_without_a_list_take_what_follows() -> None:
    argv = "--mine-enable --mine-fraction 0.8 --lr 1 --mine-sizes 1 2 4 --mine-policy=x"
    assert foreign(*argv.split(), "--mine-json", '{"a": 1}', "--mine-x", "-1", owners=(OPEN,)) == {
        "mine_enable": True,
        "mine_fraction": 0.8,
        "mine_sizes": [1, 2, 4],
        "mine_policy": "x",
        "mine_json": '{"a": 1}',
        "mine_x": -1,
    }


def test_our_own_sglang_settings_are_not_passed_through() -> None:
    argv = "--sglang-server-concurrency 4 --sglang-router-ip h --sglang-router-port 1 --sglang-config c.yaml"
    parsed = parse_flags([*argv.split(), "--sglang-router-request-timeout-secs", "9"], OWNERS)
    assert parsed.foreign == []
    assert sorted(parsed.values) == [
        "sglang_config",
        "sglang_router_ip",
        "sglang_router_port",
        "sglang_router_request_timeout_secs",
        "sglang_server_concurrency",
    ]


def test_a_backend_brings_its_own_list_and_then_nothing_is_unused() -> None:
    mine = ForeignFlags("Mine", (ForeignFlag("depth", "int"),), prefixes=("mine-",), used_by=("fast",))
    argv = ["--depth", "3", "--mine-x", "1"]
    s = load_settings([*argv, "--train-backend", "fast"], command="show", env={}, foreign=(mine,))
    assert (s.args.depth, s.args.mine_x, s.warnings) == (3, 1, [])
    s = load_settings(argv, command="show", env={}, foreign=(mine,))
    assert len(s.warnings) == 1
    with pytest.raises(ConfigError, match="unknown flag --depth"):
        load_settings(argv, command="show", env={}, foreign=())


def test_wrong_value_on_the_command_line() -> None:
    with pytest.raises(ConfigError) as caught:
        foreign("--num-layers", "many")
    assert str(caught.value) == "--num-layers 'many' (flag): expected a whole number"
