"""`examples/code_sandbox` and `examples/search` at reduced size: warmed up and trained from their own files."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from slime_core.config import load_settings
from slime_core.launch import run
from slime_core.quickstart import warmup
from slime_core.sandbox import isolation_here

ROOT = Path(__file__).parents[2]
SIZES = {"NUM_TRAIN": 64, "NUM_HELD_OUT": 8, "NUM_CODING": 64, "NUM_SEARCHING": 64, "NUM_MIXED": 64}


def example(name: str, tmp_path: Path) -> tuple[Path, ModuleType]:
    """A copy with small numbers; its recipe as a module."""
    source = (ROOT / "examples" / name / "prepare.py").read_text(encoding="utf-8")
    path = tmp_path / f"prepare_{name}.py"
    lines = [f"{key} = {value}" for key, value in SIZES.items()]
    phases = []
    for settings in warmup.PHASES:
        text = re.sub(r"(?m)^rollout_batch_size: \d+", "rollout_batch_size: 32", settings.read_text(encoding="utf-8"))
        text = re.sub(r"(?m)^lr_warmup_iters: \d+", "lr_warmup_iters: 1", text)
        phases.append(str(tmp_path / settings.name))
        Path(phases[-1]).write_text(text, encoding="utf-8")
    lines.append(f"PHASES = tuple(map(__import__('pathlib').Path, {phases!r}))")
    small = source.replace("\n\ndef prepare(", "\n" + "\n".join(lines) + "\n\n\ndef prepare(", 1)
    path.write_text(small, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return path, module


@pytest.mark.parametrize("name", ["code_sandbox", "search"])
def test_an_example_at_reduced_size(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "code_sandbox" and not isolation_here().complete:
        pytest.skip(f"no complete isolation here: {isolation_here()}")
    monkeypatch.chdir(tmp_path)
    path, recipe = example(name, tmp_path)
    argv = [
        "--config",
        str(ROOT / "examples" / name / "train.yaml"),
        "--prepare-path",
        str(path),
    ]
    argv += ["--num-rollout", "1"]
    argv += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2"]
    summary = run(load_settings(argv, command="train", env={}))
    assert Path(summary["checkpoint"]).is_dir()
    inputs = Path("outputs") / name / "inputs"
    rows = [json.loads(line) for line in (inputs / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 64
    assert json.loads((inputs / "model" / warmup.STAMP).read_text(encoding="utf-8"))["recipe"] == recipe.RECIPE.name
