from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_core.config import ForeignFlag, ForeignFlags, load_settings
from slime_core.config.flags import parse_flags
from slime_core.config.foreign import find_owners, resolve
from slime_core.config.passthrough import FlagList
from slime_core.errors import ConfigError

OWNERS = find_owners([], {})[0]
OPEN = ForeignFlags("Mine", prefixes=("mine-",))


def foreign(*argv: str, owners: tuple[ForeignFlags, ...] = OWNERS) -> dict[str, Any]:
    given = parse_flags(argv, owners).foreign
    return {name: entry.value for name, entry in resolve(given, owners, {}).items()}


def test_open_names_are_looked_up_only_when_no_setting_has_them() -> None:
    asked = []

    def listing(settings: Any) -> FlagList:
        asked.append(settings)
        toggle = ForeignFlag("depth-fusion", "toggle", off=("no-depth-fusion", "disable-fusion"), stored_as="fused")
        return FlagList((ForeignFlag("depth", "int"), toggle), "Mine 1.0")

    mine = ForeignFlags("Mine", listing=listing)
    assert foreign("--lr", "1", "--no-apply-chat-template", owners=(mine, OPEN)) == {}
    assert foreign("--mine-x", "3", owners=(mine, OPEN)) == {"mine_x": 3}
    assert asked == []
    argv = ("--depth", "3", "--disable-fusion", "--lr", "1")
    assert foreign(*argv, owners=(mine, OPEN)) == {"depth": 3, "fused": False}
    assert foreign("--depth=4", "--depth-fusion", owners=(mine,)) == {"depth": 4, "fused": True}
    with pytest.raises(ConfigError, match=r"unknown flag --dept\. Did you mean --depth\?"):
        foreign("--dept", "3", owners=(mine,))


def test_a_file_says_the_same_with_either_name(tmp_path: Path) -> None:
    toggle = ForeignFlag("depth-fusion", "toggle", off=("no-depth-fusion",), stored_as="fused")
    mine = ForeignFlags("Mine", listing=lambda _: FlagList((toggle,), "Mine 1.0"), used_by=("fast",))
    for text, fused in (("depth_fusion: false", False), ("no_depth_fusion: true", False), ("fused: true", True)):
        (tmp_path / "run.yaml").write_text(text)
        argv = ["--config", str(tmp_path / "run.yaml"), "--train-backend", "fast"]
        assert load_settings(argv, command="show", env={}, foreign=(mine,)).args.fused is fused
    (tmp_path / "run.yaml").write_text("fused: true\nno_depth_fusion: true")
    with pytest.raises(ConfigError, match="already set as 'fused'"):
        load_settings(argv, command="show", env={}, foreign=(mine,))
    (tmp_path / "run.yaml").write_text("depth_fuson: true")
    with pytest.raises(ConfigError, match=r"unknown setting 'depth_fuson'\. Did you mean depth_fusion"):
        load_settings(argv, command="show", env={}, foreign=(mine,))


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
