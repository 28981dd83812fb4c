"""The pages about plugins name what there is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from slime_core.plugins.kinds import KINDS, function_flags

ROOT = Path(__file__).resolve().parents[3]
PROJECTS = [*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("plugins/*/*/pyproject.toml")]


def test_the_readme_lists_every_plugin_folder() -> None:
    listed = set(re.findall(r"\]\((\w+(?:/\w+)?)/README\.md\)", (ROOT / "plugins" / "README.md").read_text()))
    folders = {file.parent.relative_to(ROOT / "plugins").as_posix() for file in PROJECTS}
    assert listed == folders


def test_every_plugin_has_its_parts() -> None:
    for pyproject in PROJECTS:
        folder = pyproject.parent
        wheel = tomllib.loads(pyproject.read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
        packages = [folder / name for name in wheel["packages"]]
        for part in (folder / "README.md", *(package / "py.typed" for package in packages)):
            assert part.is_file(), part
        assert {*packages} == {*folder.glob("slime_*")}


def test_every_kind_and_flag_is_documented() -> None:
    page = (ROOT / "docs" / "plugins" / "index.md").read_text()
    for kind in (*KINDS.values(), *function_flags().values()):
        assert f"| `{kind.group}` | {kind.singular} |" in page
        for flag in kind.flags:
            if flag.startswith("--"):
                assert f"`{flag}`" in page, flag
