"""`slime rehearse` finds planted mistakes, leaves a sound run alone, and writes nothing beside the run file."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from slime_commands.models.presets import model_presets
from slime_commands.rehearse.rehearsal import rehearse
from slime_commands.rehearse.running import SmallRun
from slime_commands.rehearse.scaled import Here, Options, trackers, with_model
from slime_commands.rehearse.small_model import shrink

from slime_core.config.yaml_file import dump_value
from tests.cli.planted_mistakes import CHECKED, GOOD, LAYOUT, RUN, SCORED, SETTINGS, Mistake
from tests.conftest import Slime, TinyRun

STAGES = {"check": CHECKED, "score": SCORED, "resume": RUN}
"""Last stage of a rehearsal -> mistakes that it finds."""
LIMIT_S = 120.0
"""Seconds in which a mistake is to be found."""


def _write(mistake: Mistake, inputs: Mapping[str, TinyRun], root: Path) -> Path:
    """Write the run file with its inputs, and return its path."""
    source = inputs[mistake.model].root
    shutil.copytree(source / "model", root / "model")
    for name in ("train.jsonl", "eval.jsonl"):
        shutil.copyfile(source / name, root / name)
    if mistake.plant is not None:
        mistake.plant(root)
    if mistake.code:
        (root / "mine.py").write_text(mistake.code)
    given: dict[str, Any] = {
        **GOOD, "hf_checkpoint": "model", "prompt_data": "train.jsonl", "eval_prompt_data": ["held", "eval.jsonl"],
        "save": "out", **mistake.changes,
    }  # fmt: skip
    lines = [f"{name}: {dump_value(value)}\n" for name, value in given.items() if value is not None]
    (root / "run.yaml").write_text("".join(lines).replace("{dir}", str(root)))
    return root / "run.yaml"


@pytest.fixture
def inputs(tiny: TinyRun, tiny_moe: TinyRun) -> Mapping[str, TinyRun]:
    return {"dense": tiny, "experts": tiny_moe}


@pytest.mark.parametrize(("stage", "mistake"), [*(("settings", m) for m in SETTINGS), *(("layout", m) for m in LAYOUT)])
def test_a_mistake_is_found_at_once(
    stage: str, mistake: Mistake, inputs: Mapping[str, TinyRun], tmp_path: Path
) -> None:
    run, folder = _write(mistake, inputs, tmp_path), tmp_path / "folder"
    folder.mkdir()
    report = rehearse([str(run)], Options(), folder)
    found = [problem for problem in report.problems if problem.level == "error"]
    assert any(mistake.says in problem.message for problem in found), report.problems
    assert {problem.stage for problem in found} <= {stage, "commit"}
    assert found[0].gpu_minutes == 0 or stage == "layout"
    assert report.fails()


def test_a_recipe_makes_no_model_that_a_flag_names(inputs: Mapping[str, TinyRun], tmp_path: Path) -> None:
    run, folder = _write(Mistake("", "", {"prepare_path": "addition"}), inputs, tmp_path), tmp_path / "folder"
    folder.mkdir()
    report = rehearse([str(run), "--hf-checkpoint", str(tmp_path / "Qwen3-0.6B")], Options(), folder)
    (found,) = [problem for problem in report.problems if problem.level == "error"]
    assert (found.stage, found.gpu_minutes) == ("inputs", 0)
    assert "Qwen3-0.6B (flag) is not there" in found.message
    assert "run.yaml" in found.message
    assert "rehearse" not in found.message
    assert not any(folder.glob("Qwen3-0.6B/*"))


def test_data_that_are_here_stay_beside_rows_that_stand_in(
    inputs: Mapping[str, TinyRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"prompt_data": "/elsewhere/rows.jsonl", "eval_prompt_data": ["held", "eval.jsonl@[:2]"]}
    run, folder = _write(Mistake("", "", changes), inputs, tmp_path), tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    report = rehearse([run.name], Options(stand_ins=True, until="check"), folder)
    assert [problem for problem in report.problems if problem.level == "error"] == []
    assert sum("rows that stand in" in gap for gap in report.gaps) == 1


def _files(folder: Path) -> dict[Path, int]:
    """Return when each file was written, compiled modules left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path: path.stat().st_mtime_ns for path in files}


def _rehearsed(slime: Slime, run: Path, *options: str) -> tuple[int, dict[str, Any], float]:
    before = _files(run.parent)
    began = time.monotonic()
    done = slime("rehearse", run, "--json", *options, check=False, timeout=600)
    seconds = time.monotonic() - began
    assert _files(run.parent) == before
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), seconds


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("until", "mistake"),
    [pytest.param(until, m, id=m.name) for until, table in STAGES.items() for m in table],
)
def test_a_mistake_is_found_by_rehearsing(
    until: str, mistake: Mistake, inputs: Mapping[str, TinyRun], tmp_path: Path, slime: Slime
) -> None:
    status, report, seconds = _rehearsed(slime, _write(mistake, inputs, tmp_path), "--until", until)
    named = [p for p in report["problems"] if mistake.says in p["message"]]
    assert named, report
    assert (mistake.stage, mistake.level) in {(p["stage"], p["level"]) for p in named}, report
    assert status == int(report["fails"])
    assert report["fails"] or mistake.level == "warning"
    assert seconds < LIMIT_S


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sound_run_is_rehearsed_to_its_end(inputs: Mapping[str, TinyRun], tmp_path: Path, slime: Slime) -> None:
    status, report, seconds = _rehearsed(slime, _write(Mistake("", ""), inputs, tmp_path))
    assert (status, report["problems"]) == (0, []), report
    assert [row["stage"] for row in report["stages"]] == ["model", "check", "score", "run", "resume"]
    assert report["gpus"] == 2
    assert report["predicted"]["batches"]["samples"] == 32
    assert seconds < LIMIT_S


def test_a_run_that_has_written_nothing_waits_for_nothing(tmp_path: Path) -> None:
    small = SmallRun(tmp_path / "run.yaml", tmp_path / "run", "train", {})
    for _ in range(2):
        assert (small._rows(), small.newest(), small.stage()) == ([], None, "start")
        small.directory.mkdir(exist_ok=True)


def test_incidents_of_a_run_that_was_killed_are_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    record = json.dumps({"rollout_id": 0, "check": "c", "cause": "the mask is shifted", "numbers": "3 tokens"})
    (tmp_path / "run" / "incidents.jsonl").write_text(f'{record}\n{{"rollout_id": 1, "che')
    small = SmallRun(tmp_path / "run.yaml", tmp_path / "run", "train", {})
    assert small.incidents() == ["the mask is shifted: 3 tokens"]


def test_options_of_plugins_may_be_absent(tmp_path: Path) -> None:
    here = Here({})
    with_model(here, tmp_path, small=True)
    assert list(trackers(here.values)) == []


def test_small_models_of_all_presets_can_be_split() -> None:
    for preset in model_presets().values():
        small = shrink(preset.config, stages=2)
        decoder = small.get("text_config", small)
        sizes = [decoder[name] for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")]
        assert all(size % 2 == 0 and size <= 64 for size in sizes), preset.name
        assert decoder["num_attention_heads"] % decoder["num_key_value_heads"] == 0, preset.name
        assert decoder["vocab_size"] == preset.numbers.vocab_size, preset.name
        experts = decoder.get("num_experts") or decoder.get("n_routed_experts") or decoder.get("num_local_experts") or 8
        assert experts == 8, preset.name
        assert decoder.get("num_experts_per_tok", 2) <= 2, preset.name
