"""Writes requirements-dev.txt: the root with its dev extra and every plugin of the checkout, all editable.

`python scripts/sync_requirements.py` writes the file, `--check` exits 1 when it is out of step. Standard library only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADER = """# Written by scripts/sync_requirements.py; one command for a development environment:
#   pip install -r requirements-dev.txt
"""


def requirements(root: Path) -> str:
    """The text of the file: the root first, then the plugins by path."""
    plugins = sorted(file.parent.relative_to(root).as_posix() for file in root.glob("plugins/*/*/pyproject.toml"))
    lines = ["-e .[dev]", *(f"-e ./{plugin}" for plugin in plugins)]
    return HEADER + "".join(f"{line}\n" for line in lines)


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file is out of step")
    check = parser.parse_args(argv).check
    file, wanted = root / "requirements-dev.txt", requirements(root)
    found = file.read_text(encoding="utf-8") if file.is_file() else ""
    if found == wanted:
        return 0
    if check:
        print(f"{file} is out of step with plugins/; run: python scripts/sync_requirements.py", file=sys.stderr)
        return 1
    file.write_text(wanted, encoding="utf-8")
    print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
