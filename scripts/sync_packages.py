"""Write the bundle's metadata, requirements.txt and licences from the `pyproject.toml` files below `plugins/`.

`plugins/pyproject.toml` is the distribution slime-rl: the packages and the entry points of all folders in one wheel.
A folder with `[tool.slime] published = true` is a distribution of its own, which the bundle requires. What a folder
requires is required by the bundle, its extras are the bundle's, so what is heavy belongs in an extra. A wheel takes no
file from outside its folder, so whatever is published has a copy of LICENSE, and so has the template of new plugins.
`--check` writes nothing and exits 1 when a file is out of step. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.generated import settle  # noqa: E402

REQUIREMENTS = """# Written by scripts/sync_packages.py: slime, its plugins and slime-compat, editable.
#   pip install -r requirements.txt
# A looser torch than the one that is tested may pull gigabytes of CUDA libraries.
torch==2.13.0
"""
EXTRAS = {"plugins": "[gguf]"}
"""Extras of requirements.txt: `make real` reads a GGUF file."""
BUNDLE = """# Written by scripts/sync_packages.py from the files below it: every first-party plugin in one distribution.
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "slime-rl"
version = "{version}"
description = "Reinforcement-learning post-training of language models: slime-rl-core and its first-party plugins"
readme = "README.md"
requires-python = ">=3.11"
license = "Apache-2.0"
dependencies = {dependencies}

[project.optional-dependencies]
{extras}
{entry_points}
[tool.hatch.build]
artifacts = {artifacts}
exclude = {exclude}

[tool.hatch.build.targets.wheel]
packages = {packages}
dev-mode-dirs = {folders}
"""


class Folders:
    """The distributions under `plugins/*` and `plugins/*/*`, by folder relative to `plugins`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        files = sorted([*root.glob("plugins/*/pyproject.toml"), *root.glob("plugins/*/*/pyproject.toml")])
        read = {file.parent: tomllib.loads(file.read_text(encoding="utf-8")) for file in files}
        self.all = {folder.relative_to(root / "plugins").as_posix(): facts for folder, facts in read.items()}
        self.published = [f for f, facts in self.all.items() if facts.get("tool", {}).get("slime", {}).get("published")]
        self.bundled = {folder: facts for folder, facts in self.all.items() if folder not in self.published}

    def requirements(self) -> str:
        """requirements.txt: all that is published."""
        named = [f"./{folder}{EXTRAS.get(folder, '')}" for folder in self.distributions()]
        return REQUIREMENTS + "-e .\n" + "".join(f"-e {name}\n" for name in named)

    def distributions(self) -> list[str]:
        """Folders of what is published besides the core: bundle, what is published alone, slime-compat."""
        folders = ["plugins", *(f"plugins/{folder}" for folder in self.published)]
        return [*folders, "compat"] if (self.root / "compat" / "pyproject.toml").is_file() else folders

    def bundle(self) -> str:
        """plugins/pyproject.toml."""
        init = (self.root / "slime_core" / "__init__.py").read_text(encoding="utf-8")
        version = re.findall(r'^__version__ = "(.+)"$', init, re.MULTILINE)[0]
        alone = [self.all[folder]["project"]["name"] for folder in self.published]
        required = {text for facts in self.bundled.values() for text in facts["project"].get("dependencies", ())}
        third = sorted(text for text in required if not text.startswith("slime-"))
        builds = {folder: facts["tool"]["hatch"]["build"] for folder, facts in self.bundled.items()}
        packages = [f"{f}/{path}" for f, build in builds.items() for path in build["targets"]["wheel"]["packages"]]
        named = {
            key: [f"{f}/{path}" for f, build in builds.items() for path in build.get(key, ())]
            for key in ("artifacts", "exclude")
        }
        return BUNDLE.format(
            version=version,
            dependencies=_array([f"slime-rl-core=={version}", *alone, *third]),
            extras="".join(f"{name} = {json.dumps(wanted)}\n" for name, wanted in self._extras()),
            entry_points="".join(_table(group, entries) for group, entries in self._entry_points()),
            packages=_array(packages),
            artifacts=_array(named["artifacts"]),
            exclude=_array(named["exclude"]),
            folders=_array(list(self.bundled)),
        )

    def _extras(self) -> Iterator[tuple[str, list[str]]]:
        """The core's under the bundle's name, and those of the folders."""
        core = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        found = {name: [f"slime-rl-core[{name}]"] for name in core.get("optional-dependencies", {}) if name != "dev"}
        for facts in self.bundled.values():
            for name, wanted in facts["project"].get("optional-dependencies", {}).items():
                there = found.setdefault(name, [])
                there += [requirement for requirement in wanted if requirement not in there]
        yield from sorted(found.items())

    def _entry_points(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        tables: dict[str, dict[str, str]] = {}
        for folder, facts in self.bundled.items():
            for group, entries in facts["project"].get("entry-points", {}).items():
                table = tables.setdefault(group, {})
                if twice := table.keys() & entries.keys():
                    raise SystemExit(f"plugins/{folder}/pyproject.toml: {group} has {sorted(twice)} already")
                table.update(entries)
        yield from sorted(tables.items())


def _array(words: Sequence[str]) -> str:
    return "[\n" + "".join(f"    {json.dumps(word)},\n" for word in words) + "]"


def _table(group: str, entries: Mapping[str, Any]) -> str:
    lines = "".join(
        f"{json.dumps(name) if '.' in name else name} = {json.dumps(target)}\n"
        for name, target in sorted(entries.items())
    )
    return f'\n[project.entry-points."{group}"]\n{lines}'


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is out of step")
    check = parser.parse_args(argv).check
    folders = Folders(root)
    licence = (root / "LICENSE").read_text(encoding="utf-8")
    wanted = {root / "requirements.txt": folders.requirements(), root / "plugins" / "pyproject.toml": folders.bundle()}
    wanted |= {root / folder / "LICENSE": licence for folder in folders.distributions()}
    wanted |= dict.fromkeys(root.glob("plugins/commands/*/plugins/templates/LICENSE.tmpl"), licence)
    return settle(wanted, __file__, check=check)


if __name__ == "__main__":
    sys.exit(main())
