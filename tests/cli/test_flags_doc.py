"""The generated reference and the documented examples say what the code does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from slime_core.cli import main as frame

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # `make docs` says at once what is not up to date
def test_flags_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--check"]) == 0
    monkeypatch.setattr(module, "FLAGS_PAGE", tmp_path / "reference" / "flags.md")
    assert module.main(["--check"]) == 1
    assert module.main([]) == 0
    assert module.main(["--check"]) == 0


def test_documented_examples_print_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "cli" / "config.md").read_text()
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
