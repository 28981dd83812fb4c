"""Half a loop: training on saved samples is bitwise the run that saved them; rollouts alone build no trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from slime_data.saved import read_samples

from tests.conftest import Slime, TinyRun
from tests.run_files import json_lines

WEIGHTS = "checkpoints/rollout_0000001/model.safetensors"


@pytest.fixture(scope="module")
def saved(tiny: TinyRun, slime: Slime, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learned from tokens of several weight versions, with everything saved."""
    root = tmp_path_factory.mktemp("saved")
    argv = tiny.argv(
        root / "run", num_rollout=2, dump_details=root / "details", save_hf=root / "hf" / "{rollout_id}",
        partial_rollout=True, over_sampling_batch_size=6, use_tis=True, n_samples_per_eval_prompt=2,
    )  # fmt: skip
    slime("train", *argv)
    return root


TRAINS = {"num_rollout": 2, "partial_rollout": True, "use_tis": True, "over_sampling_batch_size": 6}


@pytest.mark.slow
def test_training_on_saved_samples_is_bitwise_the_run_that_saved_them(
    tiny: TinyRun, saved: Path, slime: Slime, tmp_path: Path
) -> None:
    template = saved / "details/rollout_data/{rollout_id}.jsonl"
    flags = {**TRAINS, "load_debug_rollout_data": template, "prompt_data": None, "custom_rm_path": None}
    flags |= {"eval_prompt_data": None, "eval_interval": None, "load": tmp_path / "again"}
    for num_rollout in (1, 2):  # the second resumes the first
        done = slime("train", *tiny.argv(tmp_path / "again", **{**flags, "num_rollout": num_rollout}))
    assert "resumed from" in done.stdout
    assert "nothing is generated" in done.stderr
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (saved / "run" / WEIGHTS).read_bytes()
    then, now = json_lines(saved / "run/metrics.jsonl")[1:], json_lines(tmp_path / "again/metrics.jsonl")
    same = [k for k in now[1] if k.startswith(("train/", "rollout/")) and k in then[1]]
    assert len(same) > 20
    assert "rollout/staleness" in same
    for before, after in zip(then, now, strict=True):
        assert {k: before[k] for k in same if k in before} == {k: after[k] for k in same if k in before}


def test_what_a_run_saves(saved: Path) -> None:
    details = saved / "details"
    assert sorted(p.name for p in (details / "rollout_data").iterdir()) == [
        "0.jsonl", "1.jsonl", "eval_0.jsonl", "eval_1.jsonl",
    ]  # fmt: skip
    assert (details / "tokenizer/tokenizer.json").is_file()
    evaluated = read_samples(details / "rollout_data/eval_1.jsonl")
    assert len(evaluated) == 16
    assert {s.metadata["source_name"] for s in evaluated} == {"held"}
    for rollout_id in (0, 1):
        samples = {s.index: s for s in read_samples(details / f"rollout_data/{rollout_id}.jsonl")}
        rows = json_lines(details / f"train_data/{rollout_id}.jsonl")
        assert [row["sample_indices"] for row in rows] == sorted(samples)
        for row in rows:
            sample = samples[row["sample_indices"]]
            assert row["tokens"] == sample.tokens
            assert row["raw_reward"] == sample.reward
            for name in ("advantages", "returns", "log_probs", "rollout_log_probs", "loss_masks"):
                assert len(row[name]) == sample.response_length
            assert row["log_probs"] == pytest.approx(sample.rollout_log_probs, abs=1e-4) or rollout_id == 1


def test_a_part_of_the_saved_groups_and_files_of_thudm_slime(
    tiny: TinyRun, saved: Path, slime: Slime, tmp_path: Path
) -> None:
    rows = json_lines(saved / "details/rollout_data/0.jsonl")
    torch.save({"rollout_id": 0, "samples": rows}, tmp_path / "0.pt")
    argv = tiny.argv(
        tmp_path / "run", num_rollout=1, num_steps_per_rollout=None, global_batch_size=8, eval_interval=None,
        load_debug_rollout_data=tmp_path / "{rollout_id}.pt", load_debug_rollout_data_subsample=0.5,
        save_debug_train_data=tmp_path / "train_{rollout_id}.jsonl", debug_train_only=True,
    )  # fmt: skip
    slime("train", *argv)
    groups = list(dict.fromkeys(row["group_index"] for row in rows))
    trained = {row["group_indices"] for row in json_lines(tmp_path / "train_0.jsonl")}
    assert trained == {groups[0], groups[-1]}
    assert json_lines(tmp_path / "run/metrics.jsonl")[0]["train/steps"] == 1


def test_a_missing_file_is_said_before_anything_starts_or_at_its_rollout(
    tiny: TinyRun, saved: Path, slime: Slime, tmp_path: Path
) -> None:
    flags = {"eval_interval": None, "num_rollout": 3, "load_debug_rollout_data": tmp_path / "none/{rollout_id}.jsonl"}
    done = slime("train", *tiny.argv(tmp_path / "a", **flags), check=False)
    assert done.returncode == 1
    assert "none/0.jsonl for rollout 1" in done.stderr
    assert not (tmp_path / "a/config.yaml").exists()
    flags["load_debug_rollout_data"] = saved / "details/rollout_data/{rollout_id}.jsonl"
    done = slime("train", *tiny.argv(tmp_path / "b", **flags), check=False)
    assert done.returncode == 1
    assert "2.jsonl for rollout 3" in done.stderr
    assert (tmp_path / "b" / WEIGHTS).is_file()


def test_rollouts_only(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    """No trainer is built: a setting that only the trainer refuses changes nothing."""
    flags = {"num_rollout": 2, "debug_rollout_only": True, "only_train_params_name_list": "no_such_parameter"}
    argv = tiny.argv(tmp_path / "run", **flags)
    done = slime("train", *argv)
    assert "nothing is trained" in done.stderr
    metrics = json_lines(tmp_path / "run/metrics.jsonl")
    assert [m["step"] for m in metrics] == [0, 1, 2]
    assert metrics[0]["eval/held"] == metrics[2]["eval/held"]
    assert not any(k.startswith("train/") for k in metrics[2])
    assert not (tmp_path / "run/checkpoints").exists()
    slime("rollout", *tiny.argv(None, num_rollout=2, eval_interval=None, run_dir=tmp_path / "other"))
    for name in ("rollout_0000000.jsonl", "rollout_0000001.jsonl"):
        one, other = (read_samples(d / "rollouts" / name) for d in (tmp_path / "run", tmp_path / "other"))
        assert [(s.tokens, s.reward) for s in one] == [(s.tokens, s.reward) for s in other]
