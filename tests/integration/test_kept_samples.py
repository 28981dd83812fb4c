"""What a run keeps of what its model wrote, seen by the commands that a user types."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_runs import Run
from slime_runs.export import to_inspect
from slime_runs.files import FOLDER, file_name, sample_files
from slime_runs.index import Filter, is_thinned
from slime_runs.store import SampleStore
from slime_runs.view.server import make_app
from starlette.testclient import TestClient

from slime_core.sample import Sample
from tests.conftest import TinyRun
from tests.toy_trainer import make_args


@pytest.fixture(scope="module")
def run_dir(tiny: TinyRun, slime: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("kept") / "run"
    slime("train", *tiny.argv(save, eval_interval=1, use_rollout_entropy=True))
    return save


def test_every_sample_is_kept_with_what_it_was_paid(run_dir: Path) -> None:
    run = Run(run_dir)
    stored = list(run.samples(Filter(data_set="")))
    assert len(stored) == 4 * 4 * 4
    assert {found.entry.fate for found in stored} == {"trained"}
    assert all(path.name.endswith(".jsonl.zst") for path in (run_dir / "samples").iterdir())
    sample = stored[0].sample
    sample.validate()
    assert sample.reward == stored[0].entry.score
    assert sample.rollout_log_probs is not None
    assert len(sample.rollout_log_probs) == stored[0].entry.response_tokens
    means = dict(run.series("rollout/raw_reward"))
    given = run.trained(3)[stored[0].entry.key]
    assert len(given["log_probs"]) == len(sample.rollout_log_probs)
    assert given["log_probs"] == pytest.approx(sample.rollout_log_probs, abs=1e-4)
    entropies = [row["entropy"] for row in run.trained(3).values()]
    means_of_samples = [sum(e) / len(e) if isinstance(e, list) else e for e in entropies]
    mean = sum(means_of_samples) / len(means_of_samples)
    assert mean == pytest.approx(dict(run.series("rollout/entropy"))[4], rel=1e-5)
    rollouts = {found.entry.rollout for found in stored}
    assert rollouts == {0, 1, 2, 3}
    for rollout in rollouts:
        scores = [found.entry.score or 0.0 for found in stored if found.entry.rollout == rollout]
        assert sum(scores) / len(scores) == pytest.approx(means[rollout + 1])


def test_what_is_typed_shows_it(run_dir: Path, slime: Any) -> None:
    text = slime("show", run_dir).stdout
    assert "ended, 4 of 4 rollouts" in text
    assert "held: " in text
    assert "samples kept" in text
    best = json.loads(slime("samples", "show", run_dir, "--best", "-n", "1", "--json").stdout)
    scores = [found.entry.score or 0.0 for found in Run(run_dir).samples(Filter(data_set=""))]
    assert best["kept"]["score"] == max(scores)
    group = slime("samples", "show", run_dir, "--group", str(best["group_index"]), "-n", "9").stdout
    assert group.count("rollout ") == group.count("label: ") == 4
    listed = slime("runs", run_dir.parent).stdout
    assert "ended" in listed
    assert str(run_dir) in listed


@pytest.mark.slow
def test_killed_and_resumed_keeps_each_sample_once(tiny: TinyRun, slime: Any, tmp_path: Path, run_dir: Path) -> None:
    save = tmp_path / "run"
    slime("train", *tiny.argv(save, eval_interval=1, num_rollout=4))
    # As a kill after the second commit leaves it: files of rollouts that no checkpoint knows.
    for commit in ("rollout_0000002", "rollout_0000003"):
        shutil.rmtree(save / "checkpoints" / commit)
    (save / "checkpoints" / "latest").write_text((run_dir / "checkpoints" / "latest").read_text().replace("3", "1"))
    slime("train", *tiny.argv(save, eval_interval=1, num_rollout=4, load=save))
    texts = [(s.entry.rollout, s.entry.sample_index, s.text) for s in Run(save).samples(Filter(data_set=""))]
    assert [start for _, start in Run(save).parts()] == [0, 2]
    assert texts == [(s.entry.rollout, s.entry.sample_index, s.text) for s in Run(run_dir).samples(Filter(data_set=""))]


def test_begun_again_before_its_first_commit_it_has_no_samples_of_before(run_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "run")
    store = SampleStore()
    store.slime_run_start(args=make_args(start_rollout_id=2), run_dir=copy)
    assert len(sample_files(copy / FOLDER)) > 0
    store.slime_run_start(args=make_args(start_rollout_id=0), run_dir=copy)
    assert [path.name for path in sample_files(copy / FOLDER)] == [file_name(0, evaluation=True)]


def test_dropped_groups_are_kept_with_the_reason(tiny: TinyRun, slime: Any, tmp_path: Path) -> None:
    """The filter's own word, and for a group whose samples all failed what became of it."""
    code = """
def keep(args, samples, **kwargs):
    return samples[0].group_index % 3 != 1

async def reward(args, sample):
    if sample.group_index % 3 == 2:
        raise ValueError("no grade")
    return float(sample.index % 2)
"""
    (tmp_path / "mine.py").write_text(code)
    own = {"dynamic_sampling_filter_path": tmp_path / "mine.py:keep", "custom_rm_path": tmp_path / "mine.py:reward"}
    flags = {"num_rollout": 1, "eval_interval": None, "eval_prompt_data": None, "max_consecutive_failures": 99}
    slime("train", *tiny.argv(tmp_path / "run", **flags, **own))
    found = {
        (s.entry.group_index % 3, s.entry.fate, s.row["kept"].get("reason"))
        for s in Run(tmp_path / "run").samples(Filter(data_set=""))
    }
    assert found == {(0, "trained", None), (1, "dropped", "dropped"), (2, "failed", "failed")}
    shown = slime("samples", "show", tmp_path / "run", "--group", "1", "-n", "1").stdout
    assert "dropped (dropped)" in shown


@pytest.mark.slow
def test_old_rollouts_make_room(tiny: TinyRun, slime: Any, tmp_path: Path) -> None:
    save = tmp_path / "run"
    slime("train", *tiny.argv(save, num_rollout=6, rollout_batch_size=8, log_samples_budget=30_000))
    folder = save / "samples"
    files = sample_files(folder)
    assert sum(path.stat().st_size for path in files) <= 30_000
    assert not is_thinned(files[-1])
    assert any(map(is_thinned, files)) or len(files) < 9


def test_a_last_file_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "samples" / "rollout_0000000.jsonl.zst" / "in the way").mkdir(parents=True)
    store = SampleStore()
    store.slime_log_rollout(0, make_args(run_dir=str(tmp_path)), [Sample(tokens=[1], prompt="p", group_index=0)])
    store.slime_run_end(None)
    assert "samples are no longer stored in this run: IsADirectoryError" in caplog.text


def test_data_sets_of_similar_names_have_a_log_each(tmp_path: Path) -> None:
    store, names = SampleStore(), ["a/b", "a b", "a_b"]
    samples = {name: {"samples": [Sample(tokens=[1], prompt="p", group_index=0, index=0)]} for name in names}
    store.slime_log_eval(0, make_args(run_dir=str(tmp_path)), samples)
    store.slime_run_end(None)
    logs = tmp_path / "logs"
    logs.mkdir()
    assert to_inspect(Run(tmp_path), logs) == "3 logs"
    assert {json.loads(path.read_text())["eval"]["task"] for path in logs.iterdir()} == {*names}


def test_files_that_the_user_has_removed_count_no_more(tmp_path: Path) -> None:
    store, folder = SampleStore(), tmp_path / FOLDER
    args = make_args(run_dir=str(tmp_path), log_samples_budget=100_000)
    for rollout in range(6):
        samples = [Sample(tokens=[1], prompt=os.urandom(20_000).hex(), group_index=0, index=0)]
        store.slime_log_rollout(rollout, args, samples)
        if rollout == 2:
            store.slime_run_end(None)
            (folder / file_name(0)).unlink()
            (folder / file_name(1)).unlink()
    store.slime_run_end(None)
    files = sample_files(folder)
    assert [path.name for path in files] == [file_name(n) for n in range(2, 6)]
    assert not any(map(is_thinned, files))


def test_samples_without_numbers_make_room_too(tmp_path: Path) -> None:
    store = SampleStore()
    for rollout in range(2):
        samples = [Sample(tokens=[1], prompt="p", group_index=0)]
        store.slime_log_rollout(rollout, make_args(run_dir=str(tmp_path), log_samples_budget=1), samples)
    store.slime_run_end(None)
    assert [path.name for path in sample_files(tmp_path / FOLDER)] == [file_name(1)]


def test_what_json_has_no_form_for_is_kept_as_text(tmp_path: Path) -> None:
    """As a reward leaves it in metadata: all other samples were lost with it."""
    seen = {1: ValueError("no"), "t": torch.zeros(2), "tags": [{"a"}, 2**70], "b": b"x", "half": "\ud800", "n": 1.5}
    store = SampleStore()
    group = [Sample(tokens=[1], prompt="p", group_index=0, index=i, metadata=seen if i else {}) for i in range(2)]
    store.slime_log_rollout(0, make_args(run_dir=str(tmp_path)), group)
    store.slime_run_end(None)
    plain, odd = Run(tmp_path).samples()
    assert plain.row["metadata"] == {}
    assert odd.row["metadata"] == {
        "1": "ValueError('no')", "t": "tensor([0., 0.])", "tags": ["{'a'}", 2**70], "b": "b'x'",
        "half": "'\\ud800'", "n": 1.5,
    }  # fmt: skip


FANNED = """
import copy

async def two(args, sample, sampling_params, context):
    \"\"\"One execution, which becomes two samples of other tokens.\"\"\"
    parts = [sample, copy.deepcopy(sample)]
    for part in parts:
        out = await context.engine.generate(part.tokens, {**sampling_params, "sampling_seed": None})
        part.append_response_tokens(args, out.token_ids, out.log_probs, meta_info=out.meta_info, text=out.text)
    return parts
"""


def test_samples_of_one_execution_have_each_what_the_trainer_made_of_it(
    tiny: TinyRun, slime: Any, tmp_path: Path
) -> None:
    (tmp_path / "two.py").write_text(FANNED)
    flags = {"custom_generate_function_path": f"{tmp_path / 'two.py'}:two", "num_rollout": 1, "eval_interval": None}
    slime("train", *tiny.argv(tmp_path, run_dir=tmp_path, **flags))
    run = Run(tmp_path)
    stored, given = list(run.samples()), run.trained(0)
    assert sorted(found.entry.key for found in stored) == [(index, part) for index in range(16) for part in (0, 1)]
    assert len({tuple(found.sample.tokens) for found in stored}) > 16
    for found in stored:
        own = given[found.entry.key]["log_probs"]
        assert own == pytest.approx(found.sample.rollout_log_probs, abs=1e-4)
    assert "makes several samples of one execution" in slime("resample", tmp_path, 0, check=False).stderr
    with TestClient(make_app(tmp_path), base_url="http://127.0.0.1") as page:
        for found in stored[:4]:
            where = {"rollout": 0, "sample": found.entry.sample_index, "part": found.entry.part}
            assert page.get("api/sample", params=where).json()["tokens"]["ids"] == found.sample.tokens
