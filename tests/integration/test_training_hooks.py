"""A custom loss and a last word on the data, from files and from a plugin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyRun
from tests.run_files import metrics

QUIET = {"eval_interval": None, "eval_prompt_data": None, "num_rollout": 2, "save_interval": 2}

POST = """
def post(args, rollout_id, rollout_data):
    for part in rollout_data["advantages"]:
        part.mul_(0.0)
"""


def test_the_data_hook_has_the_last_word(tiny: TinyRun, tmp_path: Path, slime: Any) -> None:
    (tmp_path / "mine.py").write_text(POST)
    flags = {**QUIET, "use_rollout_entropy": True, "rollout_data_postprocess_path": tmp_path / "mine.py"}
    slime("train", *tiny.argv(tmp_path / "run", **flags))
    for line in metrics(tmp_path / "run"):
        assert line["rollout/advantages"] == line["train/grad_norm"] == 0.0
        assert line["rollout/raw_reward"] != 0.0
        assert line["rollout/entropy"] == pytest.approx(line["train/entropy_loss"], rel=1e-4)
    (tmp_path / "mine.py").write_text("def post(args, rollout_id, rollout_data):\n    raise KeyError('oops')\n")
    done = slime("train", *tiny.argv(tmp_path / "other", **flags), check=False)
    assert "--rollout-data-postprocess-path" in done.stderr
    assert "raised KeyError" in done.stderr


PLUGIN = """
from slime_core import hookimpl

@hookimpl
async def slime_sample_generated(sample, rollout_id, evaluation):
    sample.metadata["seen"] = [rollout_id, evaluation]

@hookimpl
def slime_filter_samples(groups):
    groups[0][0].remove_sample = True

@hookimpl
def slime_train_data(rollout_data):
    rollout_data["advantages"][-1].fill_(7.0)
"""


def test_a_strangers_plugin_is_called_without_a_flag(run_loop: Any, tmp_path: Path) -> None:
    """In an embedded run, before the function that a flag names."""
    folder = tmp_path / "acme-watch"
    folder.mkdir()
    (folder / "acme_watch.py").write_text(PLUGIN)
    entry = '[project.entry-points."slime.plugins"]\nwatch = "acme_watch"\n'
    (folder / "pyproject.toml").write_text(f'[project]\nname = "acme-watch"\nversion = "1"\n{entry}')
    (tmp_path / "mine.py").write_text(
        "def post(args, rollout_id, rollout_data):\n"
        "    assert rollout_data['advantages'][-1].eq(7.0).all()\n"
        "    for part in rollout_data['advantages']:\n        part.mul_(0.0)\n"
    )
    found = {"plugin_dir": [folder], "rollout_data_postprocess_path": tmp_path / "mine.py"}
    dump = {"save_debug_train_data": tmp_path / "train_{rollout_id}.jsonl"}
    run = run_loop(1, **found, **dump)
    assert run.steps[0]["train/grad_norm"] == 0.0
    assert all(sample.metadata["seen"] == [0, False] for sample in run.samples[0])
    rows = [json.loads(line) for line in (tmp_path / "train_0.jsonl").read_text().splitlines()]
    assert [any(row["loss_masks"]) for row in rows].count(False) == 1
    kinds = {found["kind"] for found in run.summary["plugins"] if "acme" in found["target"] or "mine" in found["name"]}
    assert kinds == {"plugins", "slime_train_data"}
