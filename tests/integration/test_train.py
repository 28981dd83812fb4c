"""Whole runs through the command line: what a user types and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import slime_core
from tests.conftest import TinyRun
from tests.run_files import metrics

ROOT = Path(__file__).parents[2]


def test_a_run_learns_and_leaves_everything_behind(tiny: TinyRun, tmp_path: Path, slime) -> None:
    save = tmp_path / "run"
    flags = {"num_rollout": 12, "save_interval": 5, "eval_interval": 5, "check_weight_update_equal": True}
    done = slime("train", *tiny.argv(save, **flags))
    lines = metrics(save)
    assert [line["step"] for line in lines] == list(range(13))
    rewards = [line["rollout/raw_reward"] for line in lines[1:]]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.2
    assert max(line["train/train_rollout_logprob_abs_diff_max"] for line in lines[1:]) < 1e-4
    summary = json.loads((save / "summary.json").read_text())
    assert summary["eval_after"] > summary["eval_before"]
    assert summary["eval_before"] == lines[0]["eval/held"]
    assert summary["seed"] == 1234
    assert summary["versions"]["slime-rl"] == summary["versions"]["slime-rl-core"] == slime_core.__version__
    used = {(p["kind"], p["name"]): p for p in summary["plugins"]}
    assert used["estimators", "grpo"]["version"] == "0.1.0"
    assert len(used["rewards", str(tiny.root / "rm.py")]["sha256"]) == 64
    wide = [f"+-{1.96 * lines[at]['eval/held-stderr']:.2f}" for at in (0, -1)]
    assert done.stdout.splitlines()[-1] == (
        f"held-out accuracy {summary['eval_before']:.2f} -> {summary['eval_after']:.2f} (95%: {wide[0]}, {wide[1]})"
    )
    assert "rollout 12/12  reward" in done.stdout


def test_checkpoints_open_in_transformers_and_config_loads_back(tiny: TinyRun, tmp_path: Path, slime) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save = tmp_path / "run"
    slime("train", *tiny.argv(save, num_rollout=1))
    summary = json.loads((save / "summary.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(summary["checkpoint"])
    tokenizer = AutoTokenizer.from_pretrained(summary["checkpoint"])
    assert sum(p.numel() for p in model.parameters()) == 330_496
    assert tokenizer.decode(tokenizer("37+48=?")["input_ids"]) == "37+48=?"
    text = (save / "config.yaml").read_text()
    assert "lr: 0.003  # flag" in text
    assert "seed: 1234  # default" in text
    shown = slime("config", "show", "--config", save / "config.yaml", "--json").stdout
    assert yaml.safe_load(shown)


def test_estimators_kl_and_filters_run(tiny: TinyRun, tmp_path: Path, slime) -> None:
    save = tmp_path / "run"
    flags = {
        "num_rollout": 3, "advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True,
        "use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "low_var_kl", "entropy_coef": 0.01,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 64, "dynamic_sampling_filter_path": "nonzero_std", "over_sampling_batch_size": 6,
    }  # fmt: skip
    slime("train", *tiny.argv(save, **flags))
    last = metrics(save)[-1]
    assert last["train/kl_loss"] > 0
    assert last["train/entropy_loss"] > 0
    assert last["rollout/groups_drawn"] >= 6


@pytest.mark.slow
def test_a_greedy_baseline_survives_partial_rollouts_and_resume(tiny: TinyRun, tmp_path: Path, slime) -> None:
    flags = {
        "advantage_estimator": "remax", "n_samples_per_prompt": 2, "partial_rollout": True, "eval_interval": None,
        "over_sampling_batch_size": 8,
    }  # fmt: skip
    once, twice = tmp_path / "once", tmp_path / "twice"
    slime("train", *tiny.argv(once, num_rollout=4, **flags))
    slime("train", *tiny.argv(twice, num_rollout=2, **flags))
    slime("train", *tiny.argv(twice, num_rollout=4, load=twice, **flags))
    straight, resumed = metrics(once), metrics(twice)
    assert any(line["rollout/groups_given_back"] for line in straight)
    names = ("rollout/greedy_baseline_reward", "rollout/raw_reward", "rollout/rewards", "train/loss")
    assert [[line[n] for n in names] for line in resumed] == [[line[n] for n in names] for line in straight]
    for line in straight:  # the shaped reward is the raw one minus the baseline, group by group
        assert line["rollout/rewards"] == pytest.approx(
            line["rollout/raw_reward"] - line["rollout/greedy_baseline_reward"], abs=1e-6
        )


def test_train_py_takes_the_flags_of_thudm_slime(tiny: TinyRun, tmp_path: Path, program) -> None:
    flags = {"sglang_mem_fraction_static": 0.7, "tensor_model_parallel_size": 1}
    argv = tiny.argv(tmp_path / "run", num_rollout=1, train_backend="embedded", rollout_engine="embedded", **flags)
    done = program(ROOT / "train.py", *argv, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--sglang-mem-fraction-static 0.7 (flag)" in done.stderr
    assert "without effect" in done.stderr


def test_rollout_and_eval_commands(tiny: TinyRun, tmp_path: Path, slime) -> None:
    from slime_core.sample import Sample

    flags = tiny.argv(None, num_rollout=2, num_steps_per_rollout=None, eval_interval=None, run_dir=tmp_path / "ro")
    slime("rollout", *flags)
    lines = (tmp_path / "ro" / "rollouts" / "rollout_0000001.jsonl").read_text().splitlines()
    samples = [Sample.from_dict(json.loads(line)) for line in lines]
    assert len(samples) == 16
    assert all(s.reward is not None and s.rollout_log_probs for s in samples)
    done = slime(
        "eval", "--hf-checkpoint", tiny.root / "model", "--eval-prompt-data", "held", tiny.root / "eval.jsonl",
        "--input-key", "input", "--label-key", "label", "--apply-chat-template", "--rm-type", "exact",
        "--n-samples-per-eval-prompt", 4, "--eval-max-response-len", 8, "--run-dir", tmp_path / "ev",
    )  # fmt: skip
    assert "eval/held-pass@4" in done.stdout
    assert json.loads((tmp_path / "ev" / "eval.json").read_text())["metrics"]["eval/held"] == 0.0
