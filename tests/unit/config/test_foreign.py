"""The door for other programs' flags: who is asked, and what becomes of what was given."""

from __future__ import annotations

from argparse import BooleanOptionalAction
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slime_core.cli.main import main
from slime_core.config import FlagParser, ForeignFlags, load_settings
from slime_core.config.foreign import find_owners
from slime_core.config.settings import Entry
from slime_core.errors import ConfigError
from slime_core.plugins.discovery import add_directory, add_installed
from slime_core.plugins.registry import RANK_CHECKOUT, Registry

ROOT = Path(__file__).resolve().parents[3]


def mine(prefix: str = "mine-") -> FlagParser:
    """What a program says of itself, in argparse's own words."""
    parser = FlagParser("Mine 2.0")
    parser.add_argument(f"--{prefix}depth", type=int, default=3, help="How deep: 100%% of it.")
    parser.add_argument(f"--{prefix}mode", choices=("a", "b"))
    parser.add_argument(f"--{prefix}expert-size", f"--{prefix}ep", type=int, dest="mine_ep_size")
    parser.add_argument(f"--{prefix}fast", action="store_true")
    parser.add_argument(f"--{prefix}strict", f"--{prefix}strictly", action=BooleanOptionalAction)
    parser.add_argument(f"--{prefix}sizes", type=int, nargs="+")
    return parser


class Asked:
    """An owner that says how often its list was asked for."""

    def __init__(self) -> None:
        self.settings: list[Mapping[str, Any]] = []
        self.checked: list[Mapping[str, Entry]] = []
        self.owner = ForeignFlags(
            "Mine",
            self.parser,
            prefixes=("mine-", "no-mine-"),
            used_by=("fast",),
            help_flag="help-mine",
            check=self.check,
        )

    def parser(self, settings: Mapping[str, Any]) -> FlagParser:
        self.settings.append(settings)
        return mine()

    def check(self, args: Any, given: Mapping[str, Entry]) -> list[str]:
        self.checked.append(given)
        return [f"seen {sorted(given)} with {args.rollout_engine}"]


def load(asked: Asked, *argv: str, env: dict[str, str] | None = None) -> Any:
    return load_settings([*argv, "--rollout-engine", "fast"], command="show", env=env or {}, foreign=(asked.owner,))


def test_the_list_is_asked_for_only_when_a_flag_is_given() -> None:
    asked = Asked()
    load(asked, "--lr", "1")
    assert (asked.settings, asked.checked) == ([], [])
    s = load(asked, "--engine-python", "/p", "--mine-depth", "2")
    assert asked.settings == [{"engine_python": "/p", "rollout_engine": "fast"}]
    assert [list(given) for given in asked.checked] == [["mine_depth"]]
    assert s.warnings == ["seen ['mine_depth'] with fast"]


def test_every_source_is_typed_alike_and_later_ones_win(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("mine_depth: 1\nmine-sizes: [1, 2]\nmine_strict: false\nmine_mode: a\nmine_fast: true\n")
    env = {"SLIME_MINE_DEPTH": "2", "SLIME_MINE_SIZES": "3 4", "SLIME_MINE_EP": "8"}
    s = load(Asked(), "--config", str(file), "--mine-depth", "3", env=env)
    a = s.args
    assert (a.mine_depth, a.mine_sizes, a.mine_strict, a.mine_mode, a.mine_fast) == (3, [3, 4], False, "a", True)
    assert a.mine_ep_size == 8
    assert str(s.origins["mine_depth"]) == "flag"
    assert str(s.origins["mine_sizes"]) == "SLIME_MINE_SIZES env"
    assert str(s.origins["mine_mode"]) == f"{file}:4"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--mine-dept 1", "--mine-dept: Mine 2.0 has no such flag. Did you mean --mine-depth?"),
        ("--mine-zzzzzz 1", "--mine-zzzzzz: Mine 2.0 has no such flag."),
        ("--no-mine-fast", "--no-mine-fast: Mine 2.0 has no such flag. Did you mean --mine-fast?"),
        ("--mine-depth", "--mine-depth (flag): expected one argument"),
        ("--mine-depth --lr 1", "--mine-depth (flag): expected one argument"),
        ("--mine-depth=", "--mine-depth (flag): invalid int value: ''"),
        ("--mine-depth 1 2", "unexpected argument '2'; every setting is a flag, see `slime config show --help-all`."),
        ("--mine-mode c", "--mine-mode (flag): invalid choice: 'c' (choose from 'a', 'b')"),
        ("--mine-fast=yes", "--mine-fast (flag): ignored explicit argument 'yes'"),
        ("--no-mine-strict x", "unexpected argument 'x'; every setting is a flag, see `slime config show --help-all`."),
    ],
)
def test_refusals_on_the_command_line(argv: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Asked(), *argv.split())
    assert str(caught.value) == message


def test_refusals_name_file_and_variable(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1\nmine_dept: 1\n")
    with pytest.raises(ConfigError) as caught:
        load(Asked(), "--config", str(file))
    assert str(caught.value) == f"{file}:2: mine_dept: Mine 2.0 has no such flag. Did you mean mine_depth?"
    file.write_text("mine_ep: 1\nmine_expert_size: 2\n")
    with pytest.raises(ConfigError) as caught:
        load(Asked(), "--config", str(file))
    assert str(caught.value) == f"{file}:2: 'mine_expert_size' is already set as 'mine_ep' in {file}:1; remove one."
    with pytest.raises(ConfigError, match=r"^SLIME_MINE_DEPTH 'x': invalid int value: 'x'$"):
        load(Asked(), env={"SLIME_MINE_DEPTH": "x"})


def test_the_help_flag_prints_the_list_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load(Asked(), "--help-mine")
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Mine (Mine 2.0; taken by: fast):"
    assert f"{'  --mine-depth N':<34}How deep: 100% of it. (default: 3)" in lines
    assert "  --mine-mode {a,b}" in lines
    assert "  --mine-expert-size, --mine-ep N" in lines


# -- entry points ----------------------------------------------------------------------------------------


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, name: str = "theirs", group: str = "foreign_flags"
) -> None:
    info = folder / f"{name}_dist-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[slime.{group}]\n{name} = {name}_module:flags\n")
    (folder / f"{name}_module.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))


GOOD = """
from slime_core.config import FlagParser, ForeignFlags
def parser(settings):
    found = FlagParser("Theirs 1.0")
    found.add_argument("--their-depth", type=int)
    return found
def flags():
    return ForeignFlags("Theirs", parser, used_by=("theirs",))
"""


def test_an_installed_distribution_brings_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, GOOD, "good")
    s = load_settings(["--their-depth", "3"], command="show", env={})
    assert s.args.their_depth == 3
    assert len(s.warnings) == 1  # no engine of that name is selected
    for argv, env in ((["--no-plugins"], {}), ([], {"SLIME_NO_PLUGINS": "1"}), ([], {"SLIME_PLUGINS": "math"})):
        with pytest.raises(ConfigError, match="unknown flag --their-depth"):
            load_settings([*argv, "--their-depth", "3"], command="show", env=env)
    allowed = load_settings(["--their-depth", "3"], command="show", env={"SLIME_PLUGINS": "math,good-dist"})
    assert allowed.args.their_depth == 3


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import not_installed_anywhere", "ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        ("flags = 3", "TypeError: 'int' object is not callable"),
        ("def flags():\n    return {}", "TypeError: returned dict, not ForeignFlags"),
        ("def flags():\n    raise RuntimeError('a\\nb')", "RuntimeError: a"),
        (
            "from slime_core.config import ForeignFlags\n"
            "def flags():\n    return ForeignFlags('X', None, prefixes=('sglang-x-',))",
            "ValueError: 'sglang-x-' already belongs to SGLang",
        ),
    ],
)
def test_a_broken_one_ends_in_a_warning(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"broken{abs(hash(code))}"
    install(tmp_path, monkeypatch, code, name)
    owners, warnings = find_owners([], {})
    assert [owner.owner for owner in owners] == ["Megatron", "SGLang's router", "SGLang", "vLLM"]
    assert warnings == [f"the flags of {name!r} ({name}-dist, slime.foreign_flags) are not known: {reason}"]
    assert load_settings([], command="show", env={}).warnings == warnings
    assert main(["--help"]) == 0
    assert main(["train", "--help"]) == 0
    assert "--rollout-batch-size" in capsys.readouterr().out


def test_in_a_plugin_directory_it_is_no_component_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "mine"\n[project.entry-points."slime.foreign_flags"]\nmine = "mine:flags"\n'
    )
    registry = Registry()
    add_directory(registry, tmp_path)
    (problem,) = registry.problems
    assert problem.message == (
        "entry points of 'slime.foreign_flags' are found in installed distributions only; type:"
        f" pip install -e {folder}"
    )
    own = Registry()
    add_directory(own, ROOT, RANK_CHECKOUT, layouts=("pyproject.toml",))
    add_installed(own)
    assert [p for p in own.problems if "foreign_flags" in p.message] == []
