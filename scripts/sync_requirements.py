"""Writes what follows from the plugins of the checkout: requirements files, and the extra `plugins` of pyproject.toml.

`requirements.txt` installs the root, every plugin and slime-compat, all editable; `requirements-dev.txt` adds what the
tests need. The extra names every plugin's distribution, which is how an installed slime knows its own. `--check` writes
nothing and exits 1 when one of the files is out of step. Standard library only.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADER = """# Written by scripts/sync_requirements.py: slime, the plugins of the checkout and slime-compat, editable.
#   pip install -r requirements.txt
# A looser torch than the one that is tested may pull gigabytes of CUDA libraries.
torch==2.13.0
"""
DEVELOPMENT = """# Written by scripts/sync_requirements.py; one command for a development environment:
#   pip install -r requirements-dev.txt
-r requirements.txt
slime-rl[dev]
"""


def requirements(root: Path) -> str:
    """The text of the file: the root first, then the other distributions of the checkout by path."""
    found = [*root.glob("plugins/*/*/pyproject.toml"), *root.glob("compat/pyproject.toml")]
    folders = sorted(file.parent.relative_to(root).as_posix() for file in found)
    lines = ["-e .", *(f"-e ./{folder}" for folder in folders)]
    return HEADER + "".join(f"{line}\n" for line in lines)


def with_extra(root: Path) -> str:
    """The text of pyproject.toml with the extra `plugins` brought up to date."""
    names = sorted(
        tomllib.loads(file.read_text(encoding="utf-8"))["project"]["name"]
        for file in root.glob("plugins/*/*/pyproject.toml")
    )
    extra = "plugins = [\n" + "".join(f'    "{name}",\n' for name in names) + "]\n"
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    return re.sub(r"^plugins = \[\n.*?^\]\n", lambda _: extra, text, count=1, flags=re.MULTILINE | re.DOTALL)


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is out of step")
    check = parser.parse_args(argv).check
    wanted = {root / "requirements.txt": requirements(root), root / "requirements-dev.txt": DEVELOPMENT}
    if (root / "pyproject.toml").is_file():
        wanted[root / "pyproject.toml"] = with_extra(root)
    stale = [file for file, text in wanted.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    for file in stale:
        if check:
            print(f"{file} is out of step with plugins/; run: python scripts/sync_requirements.py", file=sys.stderr)
        else:
            file.write_text(wanted[file], encoding="utf-8")
            print(f"wrote {file}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
