"""The documented examples of settings print what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_core.cli import main as frame

ROOT = Path(__file__).resolve().parents[2]


def test_documented_examples_print_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "concepts" / "settings.md").read_text()
    blocks = re.findall(r"```(?:yaml)?\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(blocks[0])
    tried = 0
    for block in blocks:
        for command, shown in re.findall(r"^\$ slime (.*)\n((?:(?!\$ ).*\n?)*)", block, re.MULTILINE):
            frame.main(command.split())
            captured = capsys.readouterr()
            printed = captured.out + captured.err
            assert printed.startswith(shown.removesuffix("...\n"))
            tried += 1
    assert tried == 3
