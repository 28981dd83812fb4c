"""Count openings and words that plain English does without, and compare them with a budget that only falls.

`make lint` runs it with `--check`. A text is a docstring, a comment, a message in code (a string with a blank in it) or
a line of a hand-written page. Docstrings are counted by their first word, every text by the words of `WORDS`. The
budgets are findings per 1,000 texts: lower them when the count falls, never raise them. Standard library only.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OPENINGS = re.compile(r"(What|Whoever|Of|That|Those|Where|As|With|Its|One|None of)\b")
WORDS = re.compile(
    r"\b(anew|whoever|nobody|(?:is|are|was) told|gone on|goes? on from|for good|(?:is|are) none|beside it)\b",
    re.IGNORECASE,
)
BUDGETS = {"docstrings": 3.0, "words": 2.0}
"""Findings per 1,000 docstrings, and per 1,000 texts of any kind."""
GENERATED = ("tests/golden/",)


class Text(NamedTuple):
    """A text of a file: its place, whether it is a docstring, and its words."""

    place: str
    docstring: bool
    words: str


def texts(root: Path = ROOT) -> Iterator[Text]:
    """Yield the texts of the Python files and pages that git tracks, without tests."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=root, capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        if name.startswith(GENERATED) or "tests/" in name or not (root / name).is_file():
            continue
        source = (root / name).read_text(encoding="utf-8")
        yield from _of_python(name, source) if name.endswith(".py") else _of_page(name, source)


def _of_python(name: str, source: str) -> Iterator[Text]:
    tree = ast.parse(source)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.add(id(node.value))
            yield Text(f"{name}:{node.lineno}", True, node.value.value)
    for node in ast.walk(tree):
        if id(node) in docstrings or not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if " " in node.value.strip():
            yield Text(f"{name}:{node.lineno}", False, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(f"{name}:{token.start[0]}", False, token.string)


def _of_page(name: str, source: str) -> Iterator[Text]:
    fenced = False
    for number, line in enumerate(source.split("\n"), 1):
        fenced ^= line.lstrip().startswith("```")
        if line.strip() and not fenced:
            yield Text(f"{name}:{number}", False, line)


def measure(root: Path = ROOT) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Return the findings per 1,000 of each budget, and a line for each finding."""
    found: dict[str, list[str]] = {"docstrings": [], "words": []}
    counts: Counter[str] = Counter()
    for text in texts(root):
        counts["words"] += 1
        first = " ".join(text.words.split())[:90]
        if text.docstring:
            counts["docstrings"] += 1
            if OPENINGS.match(text.words.strip()):
                found["docstrings"].append(f"{text.place} {first}")
        found["words"] += [f"{text.place} {match.group()!r} in: {first}" for match in WORDS.finditer(text.words)]
    return {name: 1000 * len(lines) / max(counts[name], 1) for name, lines in found.items()}, found


def main() -> int:
    """Print the rates; with `--check` exit 1 if one is above its budget, with `--list` print each finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if a rate is above its budget")
    parser.add_argument("--list", action="store_true", help="print every finding")
    options = parser.parse_args()
    rates, found = measure()
    for name, rate in rates.items():
        print(f"{name}: {rate:.1f} per 1,000 (budget {BUDGETS[name]:.1f})")
        for line in found[name] if options.list else ():
            print(f"  {line}")
    over = [name for name, rate in rates.items() if rate > BUDGETS[name]]
    if over and options.check:
        print(f"over budget: {', '.join(over)}. See CONTRIBUTING.md, Words; --list prints each one.", file=sys.stderr)
    return int(options.check and bool(over))


if __name__ == "__main__":
    sys.exit(main())
