"""Every hook flag has an example under `examples/hooks` (or beside it), which runs here and visibly does its work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slime_testing_contracts import LoopRun

from slime_core.sample import Sample
from tests.conftest import Slime, TinyRun
from tests.run_files import json_lines

EXAMPLES = Path(__file__).parents[2] / "examples"
HOOKS = EXAMPLES / "hooks"
RunLoop = Callable[..., LoopRun]


def train(slime: Slime, tiny: TinyRun, run_dir: Path, **flags: Any) -> list[dict[str, Any]]:
    """Metrics of a run of one rollout, whose samples are in `samples/0.jsonl` of its directory."""
    base = {"num_rollout": 1, "num_steps_per_rollout": 1, "save_interval": None, "eval_interval": None}
    dump = {"save_debug_rollout_data": run_dir / "samples" / "{rollout_id}.jsonl"}
    slime("train", *tiny.argv(run_dir, **{**base, **dump, **flags}))
    return json_lines(run_dir / "metrics.jsonl")


def test_every_hook_example_is_tested_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert {p.name for p in HOOKS.iterdir() if p.suffix in (".py", ".yaml") and p.name not in text} == set()


def test_hooks_of_samples_and_of_the_rollouts_end(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    files = [str(HOOKS / "sample_hook.py"), f"{HOOKS / 'sample_hook.py'}:note_origin"]
    argv = tiny.argv(
        run_dir, num_rollout=1, num_steps_per_rollout=1, save_interval=None, eval_interval=1,
        rollout_sample_hook_path=files[0], rollout_sample_filter_path=HOOKS / "sample_filter.py",
        rollout_all_samples_process_path=HOOKS / "sample_filter.py", over_sampling_batch_size=8,
        custom_rollout_log_function_path=HOOKS / "log_functions.py", n_samples_per_eval_prompt=2,
        custom_eval_rollout_log_function_path=HOOKS / "log_functions.py",
        dynamic_sampling_filter_path=EXAMPLES / "custom_filter.py", dump_details=tmp_path / "details",
    )  # fmt: skip
    (tmp_path / "between.yaml").write_text("custom: {keep_between: [0.02, 1.0]}\n")
    argv += ["--rollout-sample-hook-path", files[1], "--config", str(tmp_path / "between.yaml")]
    slime("train", *argv)
    samples = json_lines(tmp_path / "details/rollout_data/0.jsonl")
    assert {s["metadata"]["origin"] for s in samples} == {"rollout 0"}
    evaluated = json_lines(tmp_path / "details/rollout_data/eval_0.jsonl")
    assert {s["metadata"]["origin"] for s in evaluated} == {"evaluation 0"}
    cut = [s for s in samples if s["status"] == "truncated"]
    assert cut
    assert all(s["loss_mask"][-1] == 0 for s in cut)
    # Two of four samples of each group are trained on, and the others are outside its statistics.
    assert sum(s["remove_sample"] for s in samples) == 8
    trained = json_lines(tmp_path / "details/train_data/0.jsonl")
    assert sum(any(row["loss_masks"]) for row in trained) == 8
    removed = {s["index"] for s in samples if s["remove_sample"]}
    for row in trained:
        if row["sample_indices"] in removed:
            assert row["rewards"] == 0
    for group in {row["group_indices"] for row in trained}:
        kept = [r for r in trained if r["group_indices"] == group and any(r["loss_masks"])]
        assert sum(r["rewards"] for r in kept) == pytest.approx(0, abs=1e-6)
    first, last = json_lines(run_dir / "metrics.jsonl")
    assert last["rollout/masked_samples"] == 8
    assert last["rollout/longest_text"] == max(len(s["response"]) for s in samples)
    assert last["rollout/raw_reward"] >= 0  # the built-in metrics are there as well
    assert {"eval/held/above_half", "eval/held"} <= first.keys()
    (seen,) = json_lines(run_dir / "prompts.jsonl")
    assert seen["source"] == "DatasetSource"
    drops = sum(v for k, v in last.items() if "dynamic_filter/drop_" in k)
    assert drops > 0
    assert len(seen["mean_reward"]) == 4 + drops  # dropped groups are among them
    used = {p["kind"].removeprefix("slime_") for p in json.loads((run_dir / "summary.json").read_text())["plugins"]}
    assert {"sample_generated", "filter_samples", "process_all_samples", "log_rollout", "log_eval"} <= used


@pytest.mark.slow
def test_custom_config_and_metrics_of_ones_own_alone(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    log = HOOKS / "log_functions.py"
    metrics = train(
        slime, tiny, tmp_path / "run", custom_config_path=HOOKS / "custom_config.yaml", eval_interval=1,
        custom_rollout_log_function_path=log, custom_eval_rollout_log_function_path=log,
    )  # fmt: skip
    rollout = {k for k in metrics[1] if k.startswith(("rollout/", "perf/rollout", "perf/tokens"))}
    assert "rollout/longest_text" in rollout
    assert not rollout & {"rollout/response_len/mean", "rollout/failed_ratio", "perf/rollout_time"}
    assert {k for k in metrics[0] if k.startswith("eval/")} == {"eval/held/above_half"}
    text = (tmp_path / "run/config.yaml").read_text()
    assert "only_my_metrics: true" in text
    assert re.search(r"rollout_seed: 7  # .*custom_config.yaml", text)


@pytest.mark.slow
def test_rollout_evaluation_and_data_source_of_ones_own(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    own = {
        "rollout_function_path": HOOKS / "rollout_function.py", "data_source_path": HOOKS / "data_source.py",
        "eval_function_path": f"{HOOKS / 'rollout_function.py'}:evaluate", "prompt_data": None,
        "eval_prompt_data": None, "eval_interval": 1, "save_interval": 1,
        "rollout_sample_hook_path": f"{HOOKS / 'sample_hook.py'}:note_origin",
    }  # fmt: skip
    metrics = train(slime, tiny, tmp_path / "run", **own)
    assert metrics[1]["rollout/spread_kept"] > metrics[1]["rollout/spread_left_out"]
    assert metrics[0]["eval/probes_asked"] == 3
    assert "eval/probes" in metrics[0]
    samples = [Sample.from_dict(row) for row in json_lines(tmp_path / "run/samples/0.jsonl")]
    assert len({s.group_index for s in samples}) == 4
    assert all(s.metadata["source_name"] == "sums" and s.metadata["origin"] == "rollout 0" for s in samples)
    # Eight groups were drawn; a resumed run goes on with the ninth.
    train(slime, tiny, tmp_path / "run", **own, load=tmp_path / "run", num_rollout=2)
    assert {row["group_index"] for row in json_lines(tmp_path / "run/samples/1.jsonl")} <= set(range(8, 16))


def test_rewards_advantages_and_train_data(run_loop: RunLoop, tmp_path: Path) -> None:
    flags = {
        "custom_advantage_function_path": HOOKS / "advantage.py", "custom_config_path": HOOKS / "custom_config.yaml",
        "rollout_data_postprocess_path": HOOKS / "advantage.py",
    }  # fmt: skip
    shaping = HOOKS / "reward_shaping.py"
    for name in ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"):
        dump = {"save_debug_train_data": tmp_path / name / "train_{rollout_id}.jsonl"}
        run = run_loop(1, **flags, **dump, **{name: shaping})
        rows = json_lines(tmp_path / name / "train_0.jsonl")
        assert all(row["rewards"] in (-1.0, -1 / 3, 0.0, 1 / 3, 1.0, -2 / 3, 2 / 3) for row in rows)
        assert {row["raw_reward"] for row in rows} != {row["rewards"] for row in rows}
        for row in rows:
            scale = 0.5 if row["rewards"] < 0 else 1.0  # halved by the postprocess function
            distance = range(row["response_lengths"] - 1, -1, -1)
            assert row["advantages"] == pytest.approx([scale * row["rewards"] * 0.9**d for d in distance], abs=1e-6)
            assert ("letters" in row) == ("convert" in name)
        assert run.steps[0]["rollout/rewards"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_losses(run_loop: RunLoop) -> None:
    file = HOOKS / "policy_loss.py"
    plain = run_loop(1).steps[0]
    tis = run_loop(1, use_tis=True, custom_tis_function_path=file).steps[0]
    assert tis["train/my_ratio"] == pytest.approx(1, abs=1e-3)
    reduced = run_loop(1, custom_pg_loss_reducer_function_path=file).steps[0]
    # A sum over sqrt(length) is sqrt(length) times a mean, and most responses have 8 tokens.
    assert reduced["train/grad_norm"] == pytest.approx(plain["train/grad_norm"] * 8**0.5, rel=0.2)
    own = run_loop(1, loss_type="custom_loss", custom_loss_function_path=file).steps[0]
    assert own["train/my_entropy"] == pytest.approx(plain["train/entropy_loss"], rel=1e-4)
    # In the first step the ratio is 1, so the gradient is that of the policy loss.
    assert own["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "delta"])
def test_weights_on_disk(tiny: TinyRun, slime: Slime, tmp_path: Path, mode: str) -> None:
    run_dir, hook = tmp_path / "run", HOOKS / "weights_written.py"
    flags = {"update_weight_mode": mode, "update_weight_transport": "disk", "update_weight_disk_keep_files": True}
    train(slime, tiny, run_dir, **flags, custom_update_weight_post_write_path=hook)
    rows = json_lines(run_dir / "weights.jsonl")
    assert [row["version"] for row in rows] == ["weight_v000001", "weight_v000002"]
    assert rows[1]["bytes"] == sum(p.stat().st_size for p in run_dir.glob("weights/weight_v000002/*.safetensors")) > 0
    assert all(row["engines"] == 1 for row in rows)
    used = {p["kind"] for p in json.loads((run_dir / "summary.json").read_text())["plugins"]}
    assert "slime_weights_written" in used


@pytest.mark.slow
def test_hooks_of_megatron(run_loop: RunLoop, tmp_path: Path) -> None:
    file = HOOKS / "megatron_hooks.py"
    flags = {"train_backend": "megatron", "kl_coef": 0.01, "data_pad_size_multiplier": 1}
    hooks = {
        "custom_model_provider_path": file, "custom_megatron_init_path": file,
        "custom_megatron_before_log_prob_hook_path": file, "custom_megatron_before_train_step_hook_path": file,
    }  # fmt: skip
    run, plain = run_loop(1, **flags, **hooks), run_loop(1, **flags)
    rows = json_lines(Path(run.run_dir) / "megatron.jsonl")
    assert [row["event"] for row in rows[:3]] == ["init", "log_probs", "log_probs"]
    assert [row["store_prefix"] for row in rows if row["event"] == "log_probs"] == ["", "ref_"]
    steps = [row for row in rows if row["event"] == "step"]
    assert [(row["rollout_id"], row["step_id"]) for row in steps] == [(0, i) for i in range(len(steps))]
    assert steps[0]["lr"] == pytest.approx(run.steps[0]["train/lr"])
    # The provider builds the model that is built without it.
    assert run.steps[0]["train/grad_norm"] == pytest.approx(plain.steps[0]["train/grad_norm"], rel=1e-5)
