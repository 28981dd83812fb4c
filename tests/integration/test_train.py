"""Whole runs through the command line: what a user types and what it leaves behind."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

import slime_core
from tests.conftest import SLIME, TinyRun
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


@pytest.mark.slow
def test_the_same_seed_is_bitwise_the_same_and_another_is_not(tiny: TinyRun, tmp_path: Path, slime) -> None:
    weights = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        slime("train", *tiny.argv(tmp_path / name, num_rollout=2, rollout_seed=seed))
        weights[name] = (tmp_path / name / "checkpoints" / "rollout_0000001" / "model.safetensors").read_bytes()
    assert weights["a"] == weights["b"] != weights["c"]


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


@pytest.mark.parametrize(
    "estimator",
    [
        "dapo",
        "rloo",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("dr_grpo", "gspo", "cispo", "max_rl")),
        pytest.param("reinforce_plus_plus_baseline", marks=pytest.mark.slow),
    ],
)
def test_every_estimator_trains(tiny: TinyRun, tmp_path: Path, slime, estimator: str) -> None:
    save = tmp_path / "run"
    slime("train", *tiny.argv(save, num_rollout=1, eval_interval=None, advantage_estimator=estimator))
    (line,) = metrics(save)
    assert line["train/grad_norm"] > 0
    assert f"default of --advantage-estimator {estimator}" in (save / "config.yaml").read_text() or estimator not in (
        "dr_grpo", "dapo", "reinforce_plus_plus_baseline"
    )  # fmt: skip


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


def test_custom_advantage_function(tiny: TinyRun, tmp_path: Path, slime) -> None:
    (tmp_path / "adv.py").write_text(
        "def advantage(args, rollout_data):\n"
        "    parts = [r.expand(n).clone() for r, n in zip(rollout_data['rewards'], rollout_data['response_lengths'])]\n"
        "    rollout_data['advantages'] = rollout_data['returns'] = [p * 0 + 0.5 for p in parts]\n"
    )
    flags = {"num_rollout": 1, "custom_advantage_function_path": tmp_path / "adv.py"}
    slime("train", *tiny.argv(tmp_path / "run", **flags))
    assert metrics(tmp_path / "run")[-1]["rollout/advantages"] == pytest.approx(0.5)


GENERATE = """
import httpx

CLIENT = []

async def post(url, payload):
    if not CLIENT:
        CLIENT.append(httpx.AsyncClient(timeout=60))
    answer = await CLIENT[0].post(url, json=payload)
    answer.raise_for_status()
    return answer.json()

async def generate(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True})
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.tokens = sample.tokens + [token for _, token, *_ in pairs]
    sample.response_length += len(pairs)
    sample.response += output["text"]
    sample.rollout_log_probs = [log_prob for log_prob, *_ in pairs]
    reason = output["meta_info"]["finish_reason"]["type"]
    sample.status = sample.Status.TRUNCATED if reason == "length" else sample.Status.COMPLETED
    return sample
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in the loop", "in a worker"])
def test_functions_written_for_thudm_slime(where: str, tiny: TinyRun, tmp_path: Path, slime) -> None:
    """A generate function that posts to the router's address, and a reward that knows it, too."""
    (tmp_path / "my_gen.py").write_text(GENERATE)
    (tmp_path / "my_rm.py").write_text(
        ("async " if where == "in the loop" else "")
        + "def reward_func(args, sample, **kwargs):\n    return len(sample.response) / args.sglang_router_port\n"
    )
    flags = {
        "num_rollout": 2,
        "custom_rm_path": tmp_path / "my_rm.py",
        "custom_generate_function_path": f"{tmp_path / 'my_gen.py'}:generate",
    }
    slime("train", *tiny.argv(tmp_path / "run", **flags))
    last = metrics(tmp_path / "run")[-1]
    assert last["rollout/failed_ratio"] == 0
    assert last["train/train_rollout_logprob_abs_diff_max"] < 1e-4


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


@pytest.mark.slow
def test_sft_lowers_the_loss(tiny: TinyRun, tmp_path: Path, slime) -> None:
    from slime_commands.init import task

    rows, _ = task.warmup_rows(task.split_problems()[0], seed=0)
    data = tmp_path / "sft.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows[:256]))
    save = tmp_path / "run"
    slime(
        "sft", "--hf-checkpoint", tiny.root / "model", "--prompt-data", data, "--input-key", "messages",
        "--rollout-batch-size", 64, "--global-batch-size", 16, "--num-epoch", 2, "--lr", "2e-3", "--save", save,
        "--save-interval", 100, "--num-threads", 1, "--lr-decay-style", "constant",
    )  # fmt: skip
    losses = [line["train/loss"] for line in metrics(save)]
    assert len(losses) == 8
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.slow
def test_training_against_a_served_engine(tiny: TinyRun, tmp_path: Path, slime, free_port: int) -> None:
    """The same run with the engine in another process, behind HTTP."""
    serve = [
        SLIME,
        "serve",
        "--hf-checkpoint",
        str(tiny.root / "model"),
        "--port",
        str(free_port),
        "--num-threads",
        "1",
    ]
    server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert str(free_port) in server.stdout.readline()
        flags = {
            "num_rollout": 2, "rollout_engine": "http", "rollout_external_engine_addrs": f"127.0.0.1:{free_port}",
            "check_weight_update_equal": True,
        }  # fmt: skip
        slime("train", *tiny.argv(tmp_path / "http", **flags))
    finally:
        server.terminate()
        assert server.wait(timeout=60) == 0
    slime("train", *tiny.argv(tmp_path / "inline", num_rollout=2))
    over_http, inline = metrics(tmp_path / "http"), metrics(tmp_path / "inline")
    for first, second in zip(over_http, inline, strict=True):
        of_servers = {name for name in first.keys() - second.keys() if not name.startswith("engine/")}
        assert of_servers <= {"perf/update_weights_pause_time"}
        if "rollout/raw_reward" in first:
            assert first["rollout/raw_reward"] == pytest.approx(second["rollout/raw_reward"], rel=1e-4)


def test_a_post_process_that_raises_is_named(tiny: TinyRun, tmp_path: Path, slime) -> None:
    (tmp_path / "pp.py").write_text("def post(args, samples):\n    return samples[0].nothing, []\n")
    flags = {"custom_reward_post_process_path": tmp_path / "pp.py", "num_rollout": 1}
    done = slime("train", *tiny.argv(tmp_path / "run", **flags), check=False)
    assert done.returncode == 2
    assert "--custom-reward-post-process-path (flag)" in done.stderr
    assert "pp.py:2" in done.stderr
    assert "Traceback" not in done.stderr
