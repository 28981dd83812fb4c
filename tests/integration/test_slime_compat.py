"""Functions as THUDM/slime's users write them (`compat/examples`), unmodified, through `slime train`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Slime, TinyRun
from tests.run_files import json_lines

EXAMPLES = Path(__file__).parents[2] / "compat" / "examples"


def train(slime: Slime, tiny: TinyRun, run_dir: Path, **flags: Any) -> list[dict[str, Any]]:
    """Metrics of a run; samples are in `samples/<rollout>.jsonl`, evaluated ones in `samples/eval_<rollout>.jsonl`."""
    base = {"num_rollout": 1, "num_steps_per_rollout": 1, "save_interval": None, "eval_interval": None}
    dump = {"save_debug_rollout_data": run_dir / "samples" / "{rollout_id}.jsonl"}
    slime("train", *tiny.argv(run_dir, **{**base, **dump, **flags}), PYTHONPATH=str(EXAMPLES))
    return json_lines(run_dir / "metrics.jsonl")


def test_a_generate_function_and_its_reward(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    metrics = train(
        slime, tiny, tmp_path, custom_generate_function_path="two_turns.generate",
        custom_rm_path="two_turns.reward_func", num_rollout=2,
    )  # fmt: skip
    samples = json_lines(tmp_path / "samples/0.jsonl")
    assert len(samples) == 16
    for sample in samples:
        assert sample["metadata"]["turns"] == 2
        assert "<|user|>again<|end|><|assistant|>" in sample["response"]
        masked = [p for p, m in zip(sample["rollout_log_probs"], sample["loss_mask"]) if not m]
        assert masked
        assert set(masked) == {0.0}
        digits = sum(c.isdigit() for c in sample["response"]) / len(sample["response"])
        assert sample["reward"] in (1.0, pytest.approx(0.5 * digits))
    last = [m for m in metrics if "train/loss" in m][-1]
    # The trainer agrees with the log-probs that came over HTTP.
    assert last["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert last["rollout/failed_ratio"] == 0


@pytest.mark.slow
def test_a_rollout_of_ones_own_with_filter_hook_and_evaluation(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    hook = tmp_path / "note.py"
    hook.write_text("def note(args, sample, rollout_id=None):\n    sample.metadata['seen'] = rollout_id\n")
    metrics = train(
        slime, tiny, tmp_path / "run", rollout_function_path="own_rollout.generate_rollout",
        dynamic_sampling_filter_path="own_rollout.at_least_two_rewards", eval_interval=1, num_rollout=2,
        rollout_sample_hook_path=f"{hook}:note", n_samples_per_prompt=2, rollout_batch_size=8,
        custom_rm_path="own_rollout.reward_func",
    )  # fmt: skip
    trained = [m for m in metrics if "rollout/rounds" in m]
    assert [m["rollout/rounds"] >= 1 for m in trained] == [True, True]
    assert sum(m.get("rollout/dynamic_filter/drop_all_alike", 0) for m in trained) > 0
    evaluated = [m for m in metrics if "eval/held" in m]
    assert len(evaluated) == 3
    for rollout_id in range(2):
        samples = json_lines(tmp_path / f"run/samples/{rollout_id}.jsonl")
        assert len(samples) == 16
        assert {s["metadata"]["seen"] for s in samples} == {rollout_id}
        for sample in samples:
            f1 = float(sample["response"].strip() == sample["label"])
            digits = sum(c.isdigit() for c in sample["response"]) / max(len(sample["response"]), 1)
            assert sample["reward"] >= f1 + digits - 1e-9
        rewards = [round(s["reward"], 3) for s in samples]
        assert all(a != b for a, b in zip(rewards[::2], rewards[1::2]))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_groups_generated_while_the_trainer_trains(tiny: TinyRun, slime: Slime, tmp_path: Path, mode: str) -> None:
    metrics = train(
        slime, tiny, tmp_path, rollout_function_path="fully_async_rollout.generate_rollout_fully_async",
        sglang_server_concurrency=16, num_rollout=3, eval_interval=3, **({"async": True} if mode == "async" else {}),
    )  # fmt: skip
    assert len([m for m in metrics if "train/loss" in m]) == 3
    seen = [s["group_index"] for r in range(3) for s in json_lines(tmp_path / f"samples/{r}.jsonl")]
    assert len(seen) == 3 * 16
    assert sorted(Counter(seen).values()) == [4] * 12  # whole groups, none twice
    assert any("eval/held" in m for m in metrics)


@pytest.mark.slow
def test_a_data_source_a_buffer_filter_and_the_default_rollout_wrapped(
    tiny: TinyRun, slime: Slime, tmp_path: Path
) -> None:
    metrics = train(
        slime, tiny, tmp_path, rollout_function_path="wrapped.generate_rollout",
        data_source_path="own_source.MarkingSource",
        buffer_filter_path="own_source.newest_first", over_sampling_batch_size=8, partial_rollout=True,
        dynamic_sampling_filter_path="slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        eval_interval=2, num_rollout=3, save_interval=1,
    )  # fmt: skip
    rollouts = [m for m in metrics if "rollout/wrapped" in m]
    assert len(rollouts) == 3
    assert any(m.get("eval/wrapped") == 1.0 for m in metrics)
    later = [s for i in (1, 2) for s in json_lines(tmp_path / f"samples/{i}.jsonl")]
    back = [s for s in later if s["metadata"]["from_buffer"]]
    assert back, "groups in excess come back"
    assert all(s["metadata"]["taken_newest_first"] for s in back)
    assert {s["metadata"]["wrapped"] for s in later} == {1, 2}
    states = sorted(tmp_path.glob("checkpoints/*/**/data_source.json"))
    assert states, "the source is stored in the checkpoint"
    state = json.loads(states[-1].read_bytes())["data_source"]
    assert state["metadata"]["drawn"] >= 12
    assert len(state["buffer"]) == rollouts[-1]["rollout/buffer/waiting_groups"]


@pytest.mark.slow
def test_a_loss_and_the_names_of_its_launch_scripts(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    metrics = train(
        slime, tiny, tmp_path, loss_type="custom_loss", custom_loss_function_path="own_loss.loss_function",
        rollout_function_path="slime.rollout.sglang_rollout.generate_rollout",
        data_source_path="slime.rollout.data_source.RolloutDataSourceWithBuffer", num_rollout=6,
        buffer_filter_path="slime.rollout.data_source.pop_first", save_interval=3,
    )  # fmt: skip
    trained = [m for m in metrics if "train/pg_loss" in m]
    assert len(trained) == 6
    for step in trained:
        assert step["train/loss"] == pytest.approx(step["train/pg_loss"] - 0.01 * step["train/entropy_bonus"], abs=1e-5)
        assert step["train/distance_to_engine"] < 1e-6
    rewards = [m["rollout/raw_reward"] for m in metrics if "rollout/raw_reward" in m]
    assert max(rewards[3:]) > rewards[0]


@pytest.mark.slow
def test_a_rollout_that_sleeps_keeps_the_engine_up_until_the_run_is_ended(tiny: TinyRun, tmp_path: Path) -> None:
    path = "slime.rollout.sleep_rollout.sleep"
    argv = [*tiny.argv(tmp_path, rollout_function_path=path, eval_interval=None)]
    command = [sys.executable, "-m", "slime_core", "train", *map(str, argv)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert run.stdout is not None
        line = next(line for line in run.stdout if "sleeps" in line)
        url = line.split()[-1]
        body = {"text": "1+1=", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        request = urllib.request.Request(
            f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert len(json.load(answer)["output_ids"]) == 3
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
    finally:
        run.kill()
        run.wait()
