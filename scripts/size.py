"""Measure the size of the core and of the repository around it.

`make size` prints the table; `tests/architecture/test_size.py` holds ceilings to the same numbers. Tokens are Python's
own, without docstrings and comments: they do not fall when lines are packed. With `--demo` two rollouts of the template
`demo` run in a temporary directory (half a minute), to count the modules that a run imports. A public name is a
function, class or constant at a module's top level without a leading underscore. Standard library only.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_DEMO = """
import json, sys
from slime_core.cli.main import main
status = main(["train", "--config", "run.yaml", "--num-rollout", "2"])
loaded = [n for n, m in list(sys.modules.items()) if n.startswith("slime_") and getattr(m, "__file__", None)]
json.dump(sorted(loaded), open("modules.json", "w"))
sys.exit(status)
"""


@dataclass(frozen=True)
class Size:
    """Totals over all modules of the core."""

    modules: int
    tokens: int
    """Python tokens without docstrings, comments, line ends and indentation."""
    code_lines: int
    """Lines without docstrings, comments and empty lines."""
    public_names: int
    kinds: int


def measure(root: Path = ROOT, parse: Callable[[Path], ast.Module] | None = None) -> Size:
    """Read every module of `root`/slime_core; `parse` returns a file's syntax tree, if the caller has it already."""
    texts = {file: file.read_text(encoding="utf-8") for file in sorted((root / "slime_core").rglob("*.py"))}
    trees = {file: parse(file) if parse else ast.parse(text) for file, text in texts.items()}
    return Size(
        modules=len(texts),
        tokens=sum(_tokens(texts[file], tree) for file, tree in trees.items()),
        code_lines=sum(_code_lines(texts[file], tree) for file, tree in trees.items()),
        public_names=sum(len(_public_names(tree)) for tree in trees.values()),
        kinds=sum(_kinds(tree) for file, tree in trees.items() if file.name.startswith("kind")),
    )


_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def _docstring_lines(tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def _tokens(text: str, tree: ast.Module) -> int:
    skipped = _docstring_lines(tree)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in _LAYOUT and token.start[0] not in skipped for token in tokens)


def _code_lines(text: str, tree: ast.Module) -> int:
    stripped = (line.strip() for line in text.split("\n"))
    lines = {number for number, line in enumerate(stripped, 1) if line and not line.startswith("#")}
    return len(lines - _docstring_lines(tree))


def _tracked(root: Path) -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\n")
    return [root / name for name in listed if name and (root / name).is_file()]


def words_of_markdown(root: Path = ROOT) -> int:
    """Count the words of Markdown that git does not ignore, without the tables that `make benchmarks` writes."""
    pages = [file for file in _tracked(root) if file.suffix == ".md" and not file.match("benchmarks/table*.md")]
    return sum(len(file.read_text(encoding="utf-8").split()) for file in pages)


def repository(root: Path = ROOT) -> dict[str, str]:
    """Return what else `make size` prints: counts over the files that git does not ignore."""
    files = _tracked(root)
    plugins = [file for file in files if file.is_relative_to(root / "plugins")]
    python = [file for file in files if file.suffix == ".py"]
    tests = [file for file in python if "tests" in file.relative_to(root).parts]
    product = [file for file in python if file.relative_to(root).parts[0] in ("slime_core", "plugins", "compat")]
    sources = {file: file.read_text(encoding="utf-8") for file in {*tests, *product}}
    lines = {file: _code_lines(text, ast.parse(text)) for file, text in sources.items()}
    return {
        "code lines of the core and the plugins": f"{sum(lines[file] for file in product if file not in tests):,}",
        "files under plugins/": f"{len(plugins):,}",
        "distributions": f"{sum(file.name == 'pyproject.toml' for file in files):,}",
        "code lines of tests": f"{sum(lines[file] for file in tests):,}",
        "words of Markdown written by hand": f"{words_of_markdown(root):,}",
        "lines of CHANGELOG.md": f"{(root / 'CHANGELOG.md').read_text(encoding='utf-8').count(chr(10)):,}",
    }


def _public_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def _kinds(tree: ast.Module) -> int:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return sum(call.func.id == "Kind" for call in calls if isinstance(call.func, ast.Name))


def demo_modules() -> list[str]:
    """Names of slime's modules in a process that has made and trained the demo. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="slime-size-") as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for arguments in (["-m", "slime_core", "init", "demo", "run.yaml"], ["-c", _DEMO]):
            command = [sys.executable, *arguments]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                done.check_returncode()
        found: list[str] = json.loads((Path(folder) / "modules.json").read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", action="store_true", help="also count the modules that a run in one process imports")
    demo = parser.parse_args().demo
    size = measure()
    rows = [
        ("modules of slime_core", f"{size.modules:,}"),
        ("tokens / code lines of slime_core", f"{size.tokens:,} / {size.code_lines:,}"),
        ("kinds", f"{size.kinds:,}"),
        ("public names", f"{size.public_names:,}"),
        *repository().items(),
    ]
    if demo:
        core = sum(name.split(".")[0] == "slime_core" for name in demo_modules())
        rows.insert(2, ("modules of slime_core that the one-process demo imports", f"{core:,}"))
    for name, value in rows:
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
