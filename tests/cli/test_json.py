"""`--json`: every command that prints a result takes it, and standard output is then JSON and nothing else."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slime_testing_contracts.tiny import tiny_model

from slime_core.cli.main import main
from slime_core.plugins.manager import current_registry
from slime_core.plugins.resolve import resolve
from tests.made_run import MadeRun

DO = {
    "train", "sft", "rollout", "serve", "view", "submit", "init", "convert", "pull-weights", "plugins new",
    "plugins install", "plugins uninstall", "plugins trace", "mcp", "models args", "models import",
}  # fmt: skip
"""Commands that do something until it is done, that pass on another's output, and flags for a shell."""
SETTINGS = {"check", "config", "plan", "engines", "eval", "rehearse", "rewards"}
"""Commands that read a run's settings, and --json beside them."""
SETTING = (
    "--hf-checkpoint", "MODEL", "--prompt-data", "no.jsonl", "--rollout-batch-size", "4", "--num-rollout", "1",
    "--rm-type", "exact",
)  # fmt: skip
READERS = (
    ("show", "RUN"), ("runs", "DIR"), ("compare", "RUN", "RUN"), ("samples", "show", "RUN"), ("why", "RUN"),
    ("samples", "show", "RUN", "--failed"), ("samples", "show", "RUN", "--grep", "no such text"),
    ("why", "RUN", "--learning"), ("ledger", "verify", "RUN"), ("ledger", "show", "RUN"),
    ("ledger", "show", "RUN", "--group", "0"), ("ledger", "show", "RUN", "--state", "trained"),
    ("rewards", "replay", "RUN", "--with", "exact"), ("report", "RUN", "--output", "OUT"),
    ("export", "RUN", "--format", "hf", "-o", "OUT"), ("resample", "RUN", "0"),
)  # fmt: skip
OTHERS = (
    ("models", "list"), ("models", "show", "qwen3-4B"), ("plugins", "list"), ("doctor",),
    ("plugins", "show", "rewards/math"), ("plugins", "show", "rewards/llm_judge"), 
    ("rewards", "attack", "exact"),
    ("rewards", "score", "--with", "NAN", "--response", "4", "--label", "4"),
    ("tokens", "check", "MODEL"), ("config", "show", "--rollout-batch-size", "4"),
    ("check", "--flags-only", *SETTING), ("plan", "--num-gpus", "0", *SETTING),
    ("engines", "plan", "--num-gpus", "8", "--rollout-engine", "sglang", *SETTING),
    ("eval", "--hf-checkpoint", "MODEL", "--eval-prompt-data", "held", "ROWS", "--input-key", "question",
     "--custom-rm-path", "NAN", "--rollout-max-response-len", "4", "--run-dir", "OUT"),
)  # fmt: skip


def parsed(text: str) -> list[Any]:
    """One document, or one on each line. Raises ValueError for anything else, NaN too."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    try:
        return [json.loads(text, parse_constant=refuse)] if text else []
    except ValueError:
        return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def leaves(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that can be typed, and its parser."""
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not below:
        yield name, parser
    for action in below:
        for word, inner in action.choices.items():
            yield from leaves(inner, f"{name} {word}".strip())


def test_every_command_takes_it() -> None:
    without = set()
    for ref in current_registry():
        if ref.kind != "commands":
            continue
        name = ref.name.replace("_", "-")
        command, parser = resolve("commands", ref.name, origin="test").obj, argparse.ArgumentParser()
        if command.add_parser is None:
            without |= {name} - SETTINGS
            continue
        command.add_parser(parser.add_subparsers())
        without |= {leaf for leaf, own in leaves(parser, "") if "--json" not in own._option_string_actions}
    assert without == DO


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose loss is no number, and that was killed within a line."""
    made = MadeRun(tmp_path_factory.mktemp("runs") / "run", texts=("\x1b[2J\u202e", "{}")).write()
    with (made / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"rollout_id": 4, "rollout/raw_reward": NaN, "train/loss": Infinity}\n{"rollout_id": 5, "rol')
    return made


@pytest.fixture(params=["whole", "empty", "missing"])
def state(request: pytest.FixtureRequest, run_dir: Path, tmp_path: Path) -> Path:
    """A run, a directory without one, and none."""
    if request.param == "whole":
        return run_dir
    folder = tmp_path / "none"
    if request.param == "empty":
        folder.mkdir()
    return folder


def printed(argv: tuple[str, ...], state: Path, tmp_path: Path, capfd: Any) -> tuple[int, list[Any]]:
    nan = tmp_path / "nan.py"
    nan.write_text("def reward(args, sample):\n    return float('nan')\n", encoding="utf-8")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "2 + 2 = ?"}\n', encoding="utf-8")
    words = {
        "NAN": f"{nan}:reward", "RUN": state, "DIR": state.parent, "OUT": tmp_path / "out", "MODEL": tiny_model(),
        "ROWS": rows,
    }  # fmt: skip
    status = main([*(str(words.get(word, word)) for word in argv), "--json"])
    said = capfd.readouterr()
    found = parsed(said.out)
    assert status in (0, 1) or (not found and "slime: error: " in said.err), said.err
    return status, found


@pytest.mark.parametrize("argv", READERS, ids=" ".join)
def test_of_a_run(argv: tuple[str, ...], state: Path, tmp_path: Path, capfd: Any) -> None:
    printed(argv, state, tmp_path, capfd)


@pytest.mark.parametrize("argv", OTHERS, ids=" ".join)
def test_of_what_is_installed(argv: tuple[str, ...], run_dir: Path, tmp_path: Path, capfd: Any) -> None:
    status, found = printed(argv, run_dir, tmp_path, capfd)
    assert found
    assert status in (0, 1)
