"""Rewards that rows name are found before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from slime_data.named_rewards import named_rewards

from slime_core.config import Args, EvalDataset
from slime_core.data.dataset import open_rows
from slime_core.errors import ConfigError
from slime_core.rollout.reward import check_named_rewards


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROWS = [
    {"input": 'says "rm_type": "prompt"', "rm_type": "elsewhere"},
    {"input": "a", "metadata": {"rm_type": "math"}},
    {"input": "b", "metadata": {"rm_type": "math"}},
    {"input": "c", "metadata": json.dumps({"rm_type": "f1", "n": 1})},
    {"input": "d", "metadata": {"custom_rm_path": "a/rm.py:f", "rm_type": ""}},
    {"input": "e", "metadata": None},
    {"input": "f", "metadata": {"rm_type": "last"}},
]
FOUND = {("rm_type", "math", 1), ("rm_type", "f1", 3), ("custom_rm_path", "a/rm.py:f", 4), ("rm_type", "last", 6)}


def test_distinct_names_with_their_first_row(tmp_path: Path) -> None:
    rows = open_rows(write(tmp_path / "a.jsonl", ROWS))
    assert set(named_rewards(rows, "metadata")) == FOUND
    assert list(named_rewards(rows, "other")) == []
    assert list(named_rewards(rows, None)) == []


class Known:
    def __init__(self, *names: str) -> None:
        self.names = names

    def require(self, spec: str, where: str) -> None:
        if spec not in self.names:
            raise ConfigError(f"{where} names {spec!r}")


def test_training_and_evaluation_rows_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    source = SimpleNamespace(rows=open_rows(path))
    args = Args()
    check_named_rewards(Known("math", "f1", "last", "a/rm.py:f"), args, source)
    with pytest.raises(ConfigError, match=r"a.jsonl:7: rm_type in the row's 'metadata' names 'last'"):
        check_named_rewards(Known("math", "f1", "a/rm.py:f"), args, source)
    dataset = EvalDataset(name="held", path=str(path))
    args.eval_datasets = [dataset]
    with pytest.raises(ConfigError, match=r"a.jsonl:4: .* 'f1'"):
        check_named_rewards(Known("math", "last", "a/rm.py:f"), args, None)
    dataset.metadata_overrides = {"rm_type": "math"}  # which wins over the rows
    check_named_rewards(Known("math", "a/rm.py:f"), args, None)
    check_named_rewards(Known(), Args(), object())
