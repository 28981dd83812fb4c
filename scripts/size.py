"""Measure the size of the core and of the repository around it.

`make size` prints the table; `tests/architecture/test_size.py` holds ceilings to the same numbers. Tokens are Python's
own, without docstrings and comments: they do not fall when lines are packed. With `--demo` two rollouts of the template
`demo` run in a temporary directory (half a minute), to count the modules that a run imports, the files that run while
its second rollout is generated and trained on, and the functions between drawing a group and the engine's `generate`
(worker processes are not traced). A public name is a function, class or constant at a module's top level without a
leading underscore. Standard library only.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import inspect
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

ROOT = Path(__file__).resolve().parents[1]
_DEMO = """
import sys
sys.path.insert(0, {scripts!r})
import size
sys.exit(size.trace_demo())
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
    """Count the words of Markdown that git does not ignore, without the pages that scripts write."""
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
    """Count the rows of kinds of component, without flags whose function `replaces` one step."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Kind"]
    return sum(all(keyword.arg != "replaces" for keyword in call.keywords) for call in calls)


@dataclass(frozen=True)
class Demo:
    """Facts of a process that has made and trained the demo."""

    modules: list[str]
    """Names of slime's modules that it imported."""
    files: list[str]
    """Files with a function that ran between the start of the second rollout and the end of its training: in the core,
    and in the plugins that a sample passes (no hooks, and not the inside of the engine and the trainer)."""
    frames: list[str]
    """Functions of slime between the one that draws a group and the engine's `generate`; starts of tasks count."""


def demo() -> Demo:
    """Make and train the demo in a process of its own. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="slime-size-") as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        script = _DEMO.format(scripts=str(ROOT / "scripts"))
        for arguments in (["-m", "slime_core", "init", "demo", "run.yaml"], ["-c", script]):
            command = [sys.executable, *arguments]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                done.check_returncode()
        return Demo(**json.loads((Path(folder) / "demo.json").read_text(encoding="utf-8")))


def trace_demo() -> int:
    """Train the demo of the working directory for two rollouts, trace the second, and write `demo.json`."""
    from slime_core.cli.main import main
    from slime_core.learning.learner import Learner
    from slime_core.rollout.stage import RolloutStage

    trace, generate, train = _Trace(), RolloutStage.generate, Learner.train

    def traced_generate(stage: RolloutStage, rollout_id: int) -> Any:
        if rollout_id == 1 and stage.parts.engine is not None:  # the recipe's warm-up has no engine
            trace.start()
        return generate(stage, rollout_id)

    def traced_train(learner: Learner, *arguments: Any) -> Any:
        try:
            return train(learner, *arguments)
        finally:
            sys.setprofile(None)

    RolloutStage.generate, Learner.train = traced_generate, traced_train  # type: ignore[method-assign]
    status = main(["train", "--config", "run.yaml", "--num-rollout", "2"])
    loaded = [n for n, m in list(sys.modules.items()) if n.startswith("slime_") and getattr(m, "__file__", None)]
    found = Demo(sorted(loaded), sorted(trace.files), trace.frames)
    Path("demo.json").write_text(json.dumps(asdict(found)), encoding="utf-8")
    return status


_PASSED = ("data", "generators", "rewards", "filters", "buffers", "estimators", "corrections")


class _Trace:
    """Functions of slime that run in this thread: their files, and the way of the first group to the engine."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.frames: list[str] = []
        self._drawing: set[CodeType] = set()
        self._begun: WeakKeyDictionary[asyncio.Task[Any], list[CodeType]] = WeakKeyDictionary()
        """Task -> functions that led to its start."""

    def start(self) -> None:
        """Trace from here until `sys.setprofile(None)`."""
        create_task = asyncio.BaseEventLoop.create_task

        def create(loop: asyncio.BaseEventLoop, *arguments: Any, **keywords: Any) -> Any:
            task = create_task(loop, *arguments, **keywords)
            self._begun[task] = self._stack(sys._getframe(1))
            return task

        asyncio.BaseEventLoop.create_task = create  # type: ignore[method-assign,assignment]
        sys.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not _is_slime(code):
            return
        if (parts := Path(code.co_filename).relative_to(ROOT).parts)[0] == "slime_core" or parts[1] in _PASSED:
            self.files.add("/".join(parts))
        if code.co_name == "get_samples" and not self._drawing:
            self._drawing = set(self._stack(frame.f_back))
        if code.co_name == "generate" and "/engine" in code.co_filename and not self.frames:
            stack = self._stack(frame)
            first = max(place for place, code in enumerate(stack) if code in self._drawing) + 1
            self.frames = [f"{Path(code.co_filename).name}: {code.co_qualname}" for code in stack[first:-1]]

    def _stack(self, frame: FrameType | None) -> list[CodeType]:
        """Return the functions of slime that lead to `frame`, through the starts of tasks."""
        found: list[CodeType] = []
        while frame is not None and frame.f_code.co_name != "_run_once":
            if _is_slime(frame.f_code):
                found.append(frame.f_code)
            frame = frame.f_back
        task = asyncio.current_task() if asyncio._get_running_loop() is not None else None
        return [*(self._begun.get(task, []) if task is not None else []), *reversed(found)]


def _is_slime(code: CodeType) -> bool:
    """Return whether this is a function of slime, not a module or a class body, which run when they are imported."""
    of_slime = code.co_filename.startswith((f"{ROOT}/slime_core", f"{ROOT}/plugins"))
    return of_slime and bool(code.co_flags & inspect.CO_OPTIMIZED)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", action="store_true", help="also count the modules that a run in one process imports")
    with_demo = parser.parse_args().demo
    size = measure()
    rows = [
        ("modules of slime_core", f"{size.modules:,}"),
        ("tokens / code lines of slime_core", f"{size.tokens:,} / {size.code_lines:,}"),
        ("kinds", f"{size.kinds:,}"),
        ("public names", f"{size.public_names:,}"),
        *repository().items(),
    ]
    if with_demo:
        found = demo()
        core = sum(name.split(".")[0] == "slime_core" for name in found.modules)
        rows[2:2] = [
            ("modules of slime_core that the one-process demo imports", f"{core:,}"),
            ("files that a sample passes, from the prompt to the loss", f"{len(found.files):,}"),
            ("call frames between drawing a group and the engine's generate", f"{len(found.frames):,}"),
        ]
    for name, value in rows:
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
