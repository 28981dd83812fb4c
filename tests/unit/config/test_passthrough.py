from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_core.config import FlagParser, ForeignFlags, load_settings
from slime_core.config.flag_parser import Switch
from slime_core.config.flags import SettingsParser
from slime_core.config.foreign import Lists, find_owners
from slime_core.errors import ConfigError

OWNERS = find_owners([], {})[0]


def foreign(*argv: str, owners: tuple[ForeignFlags, ...] = OWNERS) -> dict[str, Any]:
    parser = SettingsParser(owners)
    own = parser.read_own(argv)
    given = parser.read_foreign(argv, Lists(owners, {}), own.rest)
    return {name: entry.value for name, entry in given.items()}


def fused(**kwargs: Any) -> FlagParser:
    parser = FlagParser("Mine 1.0", **kwargs)
    parser.add_argument("--depth", type=int)
    parser.add_argument("--depth-fusion", action=Switch, off=["--no-depth-fusion", "--disable-fusion"], dest="fused")
    return parser


def test_open_names_are_looked_up_only_when_no_setting_has_them() -> None:
    asked = []

    def parser(settings: Any) -> FlagParser:
        asked.append(settings)
        return fused()

    mine, fast = ForeignFlags("Mine", parser, help_flag="help-mine"), ForeignFlags("Fast", fast_flags, ("fast-",))
    assert foreign("--lr", "1", "--no-apply-chat-template", owners=(mine, fast)) == {}
    assert foreign("--fast-x", "3", owners=(mine, fast)) == {"fast_x": "3"}
    assert asked == []
    argv = ("--depth", "3", "--disable-fusion", "--lr", "1")
    assert foreign(*argv, owners=(mine, fast)) == {"depth": 3, "fused": False}
    assert foreign("--depth=4", "--depth-fusion", owners=(mine,)) == {"depth": 4, "fused": True}
    with pytest.raises(ConfigError, match=r"unknown flag --dept\. Did you mean --depth\?"):
        foreign("--dept", "3", owners=(mine,))


def fast_flags(settings: Any) -> FlagParser:
    parser = FlagParser("Fast 1.0", allow_abbrev=True)
    for name, shape in {
        "enable": {"action": "store_true"},
        "fraction": {"type": float},
        "sizes": {"type": int, "nargs": "+"},
        "x": {},
        "chunk": {"type": int},
    }.items():
        parser.add_argument(f"--fast-{name}", **shape)
    return parser


def test_a_line_is_read_as_argparse_reads_it() -> None:
    fast = (ForeignFlags("Fast", fast_flags, ("fast-",)),)
    argv = "--fast-enable --fast-frac 0.8 --lr 1 --fast-sizes 1 2 4 --fast-x=y"
    assert foreign(*argv.split(), "--fast-chunk", "-1", owners=fast) == {
        "fast_enable": True,
        "fast_fraction": 0.8,
        "fast_sizes": [1, 2, 4],
        "fast_x": "y",
        "fast_chunk": -1,
    }
    assert foreign("--fast-fraction", "-1e-5", "--fast-x", '{"a": 1}', "--fast-x", "z", owners=fast) == {
        "fast_fraction": -1e-5,
        "fast_x": "z",
    }
    for line, message in (
        ("--fast-enable yes --lr 1", "unexpected argument 'yes'"),
        ("--lr 1 stray --fast-sizes 1", "unexpected argument 'stray'"),
        ("--fast-sizes 1 --lr 1 2", "unexpected argument '2'"),
        ("--fast-sizes 1 x", "--fast-sizes .flag.: invalid int value: 'x'"),
        ("--rollout-te 1", "unknown flag --rollout-te"),
        ("--fast_x 1", "--fast_x: Fast 1.0 has no such flag. Did you mean --fast-x"),
    ):
        with pytest.raises(ConfigError, match=message):
            foreign(*line.split(), owners=fast)


def test_a_file_says_the_same_with_either_name(tmp_path: Path) -> None:
    mine = ForeignFlags("Mine", lambda _: fused(), used_by=("fast",))
    for text, value in (("depth_fusion: false", False), ("no_depth_fusion: true", False), ("fused: true", True)):
        (tmp_path / "run.yaml").write_text(text)
        argv = ["--config", str(tmp_path / "run.yaml"), "--train-backend", "fast"]
        assert load_settings(argv, command="show", env={}, foreign=(mine,)).args.fused is value
    (tmp_path / "run.yaml").write_text("fused: true\nno_depth_fusion: true")
    with pytest.raises(ConfigError, match="already set as 'fused'"):
        load_settings(argv, command="show", env={}, foreign=(mine,))
    (tmp_path / "run.yaml").write_text("depth_fuson: true")
    with pytest.raises(ConfigError, match=r"unknown setting 'depth_fuson'\. Did you mean depth_fusion"):
        load_settings(argv, command="show", env={}, foreign=(mine,))


def test_a_backend_brings_its_own_list_and_then_nothing_is_unused() -> None:
    mine = ForeignFlags("Mine", lambda _: fused(), used_by=("fast",))
    argv = ["--depth", "3"]
    s = load_settings([*argv, "--train-backend", "fast"], command="show", env={}, foreign=(mine,))
    assert (s.args.depth, s.warnings) == (3, [])
    s = load_settings(argv, command="show", env={}, foreign=(mine,))
    assert len(s.warnings) == 1
    with pytest.raises(ConfigError, match="unknown flag --depth"):
        load_settings(argv, command="show", env={}, foreign=())


def test_wrong_value_on_the_command_line() -> None:
    with pytest.raises(ConfigError) as caught:
        foreign("--num-layers", "many")
    assert str(caught.value) == "--num-layers (flag): invalid int value: 'many'"
