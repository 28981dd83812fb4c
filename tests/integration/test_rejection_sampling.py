"""Rejection sampling end to end: `slime rollout`, `slime samples filter`, `slime sft`, twice; held-out scores rise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from slime_commands.sft.sampled_rows import KEY

from tests.conftest import TinyRun

EXAMPLE = Path(__file__).parents[2] / "examples/rejection_sampling"
TRAINING = {
    "eval_prompt_data": None, "eval_interval": None, "apply_chat_template": None, "custom_rm_path": None,
    "label_key": None, "n_samples_per_prompt": None, "num_rollout": None, "rollout_max_response_len": None,
    "rm_workers": None, "rollout_shuffle": None, "num_epoch": 3, "rollout_batch_size": 4, "num_steps_per_rollout": 1,
    "save_interval": 1000,
}  # fmt: skip


@pytest.mark.slow
def test_two_rounds(tiny: TinyRun, tmp_path: Path, slime: Any) -> None:
    model, scores = tiny.root / "model", []
    for number in range(3):
        scores.append(held_out(tiny, model, tmp_path / f"eval-{number}", slime))
        if number == 2:
            break
        run, rows = tmp_path / f"round-{number}", tmp_path / f"kept-{number}.jsonl"
        sampling = {"eval_prompt_data": None, "eval_interval": None, "num_rollout": 1, "rollout_batch_size": 12}
        argv = tiny.argv(None, hf_checkpoint=model, run_dir=run, rollout_seed=number, **sampling)
        slime("rollout", *argv)
        told = slime(
            *("samples", "filter", run, "--hf-checkpoint", model, "--best-of-group", "1", "--truncated", "--json"),
            *("-o", rows),
        )
        found = json.loads(told.stdout)
        assert (found["samples"], found["kept"], found["prompts_kept"]) == (48, 12, 12)
        save = tmp_path / f"sft-{number}"
        dump = tmp_path / f"trained-{number}" / "{rollout_id}.jsonl"
        changes = {**TRAINING, "hf_checkpoint": model, "prompt_data": rows, "save_debug_rollout_data": dump}
        slime("sft", "--config", EXAMPLE / "sft.yaml", *tiny.argv(save, **changes))
        compare_tokens(rows, Path(str(dump).format(rollout_id=0)))
        model = max((save / "checkpoints").glob("rollout_*"))
    assert scores[0] < scores[1] < scores[2], scores


def compare_tokens(rows: Path, trained: Path) -> None:
    """What the trainer got is what was sampled, id for id."""
    sampled = [json.loads(line)["metadata"][KEY]["tokens"] for line in rows.read_text().splitlines()]
    found = [json.loads(line)["tokens"] for line in trained.read_text().splitlines()]
    assert len(found) == 4
    assert all(tokens in sampled for tokens in found)


def held_out(tiny: TinyRun, model: Path, run_dir: Path, slime: Any) -> float:
    # At temperature 1, since the greedy answers of a random model are the same token over and over.
    argv = tiny.argv(None, hf_checkpoint=model, run_dir=run_dir, eval_temperature=1.0, n_samples_per_eval_prompt=8)
    slime("eval", *argv)
    return float(json.loads((run_dir / "eval.json").read_text())["metrics"]["eval/held"])
