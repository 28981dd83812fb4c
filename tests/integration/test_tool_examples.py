"""The template `tools`, `examples/code_sandbox` and `examples/search` at reduced size: what is asked for is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from slime_commands.init.warmup import PHASES, STAMP, Recipe, make_missing_model
from slime_data.saved import read_samples
from slime_sandbox_local import isolation_here

from slime_core.config import Args, load_settings
from slime_core.launch import run
from slime_core.plugins.resolve import resolve
from tests.run_files import metrics

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "tools": ("plugins/commands/slime_commands/init/templates/tools.yaml", "calculator", "calculator"),
    "code_sandbox": ("examples/code_sandbox/train.yaml", "examples/code_sandbox/prepare.py", "python"),
    "search": ("examples/search/train.yaml", "examples/search/prepare.py", "search"),
}
"""Name -> settings, recipe, and what the model calls."""


def recipe(name: str) -> dict[str, Any]:
    """The names of an example's recipe."""
    spec = EXAMPLES[name][1]
    found: dict[str, Any] = resolve("recipes", str(ROOT / spec) if "/" in spec else spec).obj.__globals__
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen nothing but the calls of all three examples: 1120 of them, 70 steps."""
    given = Args(
        hf_checkpoint=str(tmp_path_factory.mktemp("callers") / "model"), seed=0, device="cpu", num_threads=1,
        plugin_dir=[],
    )  # fmt: skip
    asking = []
    for name in EXAMPLES:
        names = recipe(name)
        train, _ = names.get("problems", names.get("facts"))()
        asking.append(names["warmup"](train, 0)[0])
    rows = [row for rows in zip(*asking) for row in rows][:1120]
    make_missing_model(given, Recipe("callers"), {PHASES[0]: rows})
    model = Path(given.hf_checkpoint)
    (model / STAMP).unlink()  # somebody's own model: the examples' recipes take it as it is
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_at_reduced_size(name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "code_sandbox" and not isolation_here().complete:
        pytest.skip(f"no complete isolation here: {isolation_here()}")
    monkeypatch.setitem(recipe(name), "NUM_HELD_OUT", 8)
    config, prepare, tool = EXAMPLES[name]
    argv = [
        "--prepare-path",
        str(ROOT / prepare) if "/" in prepare else prepare,
        "--config",
        str(ROOT / config),
        "--hf-checkpoint",
        str(model),
        "--prompt-data",
        str(tmp_path / "train.jsonl"),
    ]
    argv += ["--eval-prompt-data", "x", str(tmp_path / "x.jsonl"), "--eval-interval", "1"]
    argv += ["--save", str(tmp_path / "run")]
    argv += ["--num-rollout", "1", "--rollout-batch-size", "6", "--n-samples-per-prompt", "4", "--no-preflight"]
    argv += ["--rm-workers", "1", "--save-debug-rollout-data", str(tmp_path / "{rollout_id}.jsonl")]
    argv += ["--set", f"plugins.search.corpus={tmp_path / 'corpus.jsonl'}"] if name == "search" else []
    summary = run(load_settings(argv, command="train", env={}))
    assert Path(summary["checkpoint"]).is_dir()
    lines = metrics(tmp_path / "run")
    assert sum("eval/x" in line for line in lines) == 2
    (calls,) = [line[f"rollout/tools/{tool}/calls"] for line in lines if "rollout/raw_reward" in line]
    assert calls > 0
    samples = read_samples(tmp_path / "0.jsonl")
    called = [sample for sample in samples if sample.metadata.get("tool_stats", {}).get(tool)]
    assert any(s.metadata["tool_stats"][tool]["errors"] < s.metadata["tool_stats"][tool]["calls"] for s in called)
    told = [sample for sample in called if sample.metadata["num_turns"] > 1]
    assert told
    for sample in told:
        assert sample.loss_mask is not None
        assert 0 in sample.loss_mask, "what was answered is not trained on"
        assert sample.loss_mask == [int(version >= 0) for version in sample.token_weight_versions]
