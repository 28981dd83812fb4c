"""Commands of distributions that are not slime's: found, listed, run; a bad one is one line and stops no other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_core.cli.main import main
from tests.strangers import forgotten, install

SETTINGS = """'`slime hello`: say hello.'
from slime_core import Command
command = Command(lambda words: print('hello', *words) or 7, only_prints=True)
"""
PARSER = """'`slime good-bye`: say good-bye.'
from slime_core import Command

def add_parser(subparsers):
    subparsers.add_parser('good-bye').add_argument('--times', type=int, default=1)

command = Command(lambda namespace: print('bye ' * namespace.times) or 0, add_parser)
"""
COMMANDS = "slime.commands"


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SLIME_PLUGINS", "SLIME_NO_PLUGINS", "SLIME_PLUGIN_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("SLIME_PLUGINS")
    with forgotten():
        yield


@pytest.fixture
def acme(tmp_path: Path) -> None:
    names = {"hello": "acme_hello", "good_bye": "acme_bye:command"}
    install(tmp_path, "acme-commands", {COMMANDS: names}, acme_hello=SETTINGS, acme_bye=PARSER)


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """What `slime --help` lists."""
    assert main(["--help", *words]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    return {name: " ".join(text) for name, *text in lines}


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.usefixtures("acme")
def test_listed_without_an_import_and_run(capsys: pytest.CaptureFixture[str]) -> None:
    listed = rows(capsys)
    assert (listed["hello"], listed["good-bye"]) == ("say hello", "say good-bye")
    assert {"train", "plan", "convert", "version"} <= listed.keys()
    assert not {"acme_hello", "acme_bye"} & sys.modules.keys()
    assert main(["hello", "--to", "you"]) == 7
    assert capsys.readouterr().out == "hello --to you\n"
    assert main(["good-bye", "--times", "2"]) == 0
    assert capsys.readouterr().out == "bye bye \n"
    assert "unrecognized arguments: --lines 2" in refusal(capsys, "good-bye", "--lines", "2")


@pytest.mark.usefixtures("acme")
def test_a_plugin_like_all_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list", "--kind", "commands", "--check"]) == 0
    assert "acme-commands 1.0" in capsys.readouterr().out
    assert main(["plugins", "show", "commands/hello"]) == 0
    shown = capsys.readouterr().out
    assert "acme_hello.py:" in shown
    assert "say hello" in shown


@pytest.mark.usefixtures("acme")
def test_left_out_like_all_others(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_PLUGINS", "good_bye")
    assert "hello" not in rows(capsys)
    assert "is installed, but left out by SLIME_PLUGINS='good_bye'" in refusal(capsys, "hello")
    assert main(["good-bye"]) == 0
    capsys.readouterr()
    assert "good-bye" not in (listed := rows(capsys, "--no-plugins"))
    assert "plan" in listed, "slime's own"
    assert "left out by --no-plugins" in refusal(capsys, "good-bye", "--no-plugins")


HOSTILE = {
    "import acme_nowhere\n": "no module named 'acme_nowhere'",
    "def f(:\n": "SyntaxError",
    "raise SystemExit(3)\n": "SystemExit",
    "command = 3\n": "expected a slime_core.Command; found int 3",
    "command = print\n": "expected a slime_core.Command",
    "": "defines no public function or class",
}


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize("source", HOSTILE)
def test_a_bad_one_is_one_line_and_stops_no_other(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "acme-bad", {COMMANDS: {"bad": "acme_bad"}}, acme_bad=source)
    assert rows(capsys)["hello"] == "say hello"
    said = refusal(capsys, "bad")
    assert HOSTILE[source].lower() in said.lower()
    assert "acme-bad 1.0" in said or "slime bad" in said
    assert main(["hello"]) == 7


@pytest.mark.usefixtures("acme")
def test_names_that_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = {"hello": "acme_other", "plugins": "acme_other"}
    install(tmp_path, "acme-other", {COMMANDS: taken}, acme_other=SETTINGS.replace("'hello'", "'other'"))
    listed = rows(capsys)
    assert {"acme-other:plugins", "acme-other:hello", "acme-commands:hello"} <= listed.keys()
    assert listed["plugins"] == "list, make, check, find and install plugins"
    assert main(["plugins", "list", "--kind", "rewards"]) == 0, "the core's own"
    capsys.readouterr()
    assert "is offered by acme-commands 1.0" in refusal(capsys, "hello")
    assert main(["acme-other:hello"]) == 7
    assert capsys.readouterr().out == "other\n"


def test_from_a_plugin_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = f'[project]\nname = "acme-here"\n[project.entry-points."{COMMANDS}"]\nhello = "acme_here"\n'
    (tmp_path / "pyproject.toml").write_text(table)
    (tmp_path / "acme_here.py").write_text(SETTINGS)
    monkeypatch.setenv("SLIME_PLUGIN_DIR", str(tmp_path))
    assert main(["hello"]) == 7
    monkeypatch.setenv("SLIME_PLUGIN_DIR", str(tmp_path / "gone"))
    capsys.readouterr()
    assert "gone is not a directory" in refusal(capsys, "hello")
    assert "train" in rows(capsys)
