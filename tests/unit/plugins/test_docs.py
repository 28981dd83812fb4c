"""The pages about plugins name what there is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

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
