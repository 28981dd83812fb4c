"""Values that follow from settings, and the flags that are named with which values when they contradict each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime_core.config import Settings, load_settings
from slime_core.errors import ConfigError
from tests.sweeps import sweep

DEMO = Path(__file__).parents[3] / "plugins/commands/slime_commands/init/templates/demo.yaml"

Load = Callable[..., Settings]

DERIVED = [
    ("", "global_batch_size", 32, "derived: rollout_batch_size * n_samples_per_prompt"),
    ("", "num_steps_per_rollout", 1, "derived: rollout_batch_size * n_samples_per_prompt / global_batch_size"),
    ("--num-steps-per-rollout 2", "global_batch_size", 16,
     "derived: rollout_batch_size * n_samples_per_prompt / num_steps_per_rollout"),
    ("--global-batch-size 8", "num_steps_per_rollout", 4,
     "derived: rollout_batch_size * n_samples_per_prompt / global_batch_size"),
    ("--global-batch-size 8 --num-steps-per-rollout 4", "global_batch_size", 8, "flag"),
    ("", "max_tokens_per_gpu", 4096, "derived: use_dynamic_batch_size"),
    ("--environment-path world.py:World", "custom_generate_function_path", "multi_turn", "derived: environment_path"),
    ("--environment-path world.py:World --custom-generate-function-path mine.py:g", "custom_generate_function_path",
     "mine.py:g", "flag"),
    ("--no-use-dynamic-batch-size", "micro_batch_size", 1, "derived: use_dynamic_batch_size"),
    ("", "eps_clip_high", 0.2, "derived: eps_clip"),
    ("", "over_sampling_batch_size", 4, "derived: rollout_batch_size"),
    ("", "run_dir", "outputs/train", "derived: slime train"),
    ("--save out", "run_dir", "out", "derived: save"),
    ("--bf16", "dtype", "bfloat16", "derived: bf16"),
    ("--n-samples-per-prompt 1", "grpo_std_normalization", False, "derived: n_samples_per_prompt 1"),
    ("--use-kl-loss --kl-loss-coef 0.1", "ref_load", "/m", "derived: hf_checkpoint"),
    ("--kl-coef 0.1", "kl_loss_type", "k1", "derived: kl_coef"),
    ("--rollout-max-context-len 32", "rollout_max_prompt_len", 31, "derived: rollout_max_context_len - 1"),
    ("--rollout-max-context-len 32 --eval-max-context-len 48", "engine_max_context_len", 48,
     "derived: the longer of rollout_max_context_len and eval_max_context_len"),
    ("--rollout-max-context-len 32", "eval_max_prompt_len", 31, "derived: eval_max_context_len - 1"),
    ("--reward-key score", "eval_reward_key", "score", "derived: reward_key"),
    ("--update-weight-mode delta", "update_weight_transport", "delta", "derived: update_weight_mode"),
    ("--use-opd --opd-type local --opd-teacher-load /t", "opd_type", "megatron", "derived: opd_type local"),
]  # fmt: skip


@sweep("argv, name, value, origin", DERIVED)
def test_derived(load: Load, argv: str, name: str, value: object, origin: str) -> None:
    s = load(*argv.split())
    assert (getattr(s.args, name), str(s.origins[name])) == (value, origin)


@pytest.mark.parametrize("held", ["config.yaml", "metrics.jsonl", "checkpoints", "stalls", "eval.json"])
def test_the_default_directory_is_a_free_one(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "train" / held).mkdir(parents=True)
    s = load()
    assert s.args.run_dir == "outputs/train-2"
    assert "outputs/train holds a run, so this one goes to outputs/train-2" in "".join(s.warnings)
    (tmp_path / "outputs" / "train-2" / held).mkdir(parents=True)
    assert load().args.run_dir == "outputs/train-3"
    for flags in ("--overwrite", "--load outputs/train", "--run-dir outputs/train", "--save outputs/train"):
        s = load(*flags.split())
        assert s.args.run_dir == "outputs/train"
        assert not any("holds a run" in warning for warning in s.warnings)


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_the_place_of_a_run_file_is_its_training_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The demo's file has `save` and `overwrite`."""
    monkeypatch.chdir(tmp_path)
    args = load_settings(["--config", str(DEMO)], command=command, env={}).args
    assert (args.run_dir, args.save, args.overwrite) == (f"outputs/{command}", None, False)
    typed = load_settings(["--config", str(DEMO), "--save", "there", "--overwrite"], command=command, env={}).args
    assert (typed.run_dir, typed.save, typed.overwrite) == ("there", None, True)


BROKEN = [
    ("--rollout-batch-size 1000000000000",
     "--rollout-batch-size 1000000000000 (flag) * --n-samples-per-prompt 8 (flag) = 8000000000000 samples per"),
    ("--global-batch-size 5",
     "--rollout-batch-size 4 (flag) * --n-samples-per-prompt 8 (flag) = 32 samples per rollout cannot be divided by"
     " --global-batch-size 5 (flag);"),
    ("--num-steps-per-rollout 3",
     "--rollout-batch-size 4 (flag) * --n-samples-per-prompt 8 (flag) = 32 samples per rollout cannot be divided into"
     " --num-steps-per-rollout 3 (flag)."),
    ("--num-steps-per-rollout 2 --global-batch-size 8",
     "--rollout-batch-size 4 (flag) * --n-samples-per-prompt 8 (flag) = 32 samples per rollout, but"
     " --global-batch-size 8 (flag) * --num-steps-per-rollout 2 (flag) = 16;"),
    ("--over-sampling-batch-size 2",
     "--over-sampling-batch-size 2 (flag) must be at least --rollout-batch-size 4 (flag)."),
    ("--dynamic-sampling-on-exhausted shrink",
     "--dynamic-sampling-on-exhausted 'shrink' (flag) trains on fewer optimizer steps of whole groups, so it needs"
     " several steps per rollout and --global-batch-size 32 (derived: "),
    ("--dynamic-sampling-on-exhausted shrink --global-batch-size 4",
     "--dynamic-sampling-on-exhausted 'shrink' (flag) trains on fewer optimizer steps of whole groups, so it needs"
     " several steps per rollout and --global-batch-size 4 (flag) a multiple of --n-samples-per-prompt 8 (flag)"),
    ("--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k1",
     "--kl-loss-type 'k1' (flag) as a loss has a gradient of zero on average: nothing would pull the policy to its"),
    ("--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k2 --use-unbiased-kl",
     "--use-unbiased-kl (flag) with --kl-loss-type 'k2' (flag): k2's gradient is the KL's already, and the ratio"),
    ("--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.01",
     "--kl-coef 0.1 (flag) and --kl-loss-coef 0.01 (flag) are both set; use one: reward penalty or loss term."),
    ("--max-tokens-per-gpu 64", "--max-tokens-per-gpu 64 (flag) needs --use-dynamic-batch-size."),
    ("--balance-by-flops --micro-batch-size 2", "--balance-by-flops (flag) needs --use-dynamic-batch-size."),
    ("--rollout-max-context-len 32 --rollout-max-prompt-len 32",
     "--rollout-max-prompt-len 32 (flag) must be smaller than --rollout-max-context-len 32 (flag)."),
    ("--rollout-temperature 0", "--rollout-temperature '0' (flag): must be greater than 0"),
    ("--eps-clip-c 1", "--eps-clip-c '1' (flag): must be greater than 1"),
    ("--bf16 --dtype float32", "--bf16 (flag) contradicts --dtype 'float32' (flag); remove one."),
    ("--lr-warmup-iters 5 --lr-warmup-fraction 0.1",
     "--lr-warmup-iters 5 (flag) and --lr-warmup-fraction 0.1 (flag) are both set; use one."),
    ("--min-lr 1", "--min-lr 1.0 (flag) must not exceed --lr 1e-06 (default)."),
    ("--mask-offpolicy-in-partial-rollout", "--mask-offpolicy-in-partial-rollout (flag) needs --partial-rollout."),
    ("--only-train-params-name-list a --freeze-params-name-list b c",
     "--only-train-params-name-list 'a' (flag) and --freeze-params-name-list 'b' 'c' (flag) are both set; use one."),
    ("--eval-prompt-data a b --eval-config e.yaml",
     "--eval-config 'e.yaml' (flag) and --eval-prompt-data 'a' 'b' (flag) are both set; use one."),
    ("--use-tis --use-rollout-logprobs",
     "--use-rollout-logprobs (flag) and --use-tis (flag) are both set; use one: either the old policy is the"),
    ("--use-tis --use-rs --normalize-advantages --proximal-policy interpolate",
     "--use-rs (flag) with --normalize-advantages (flag) and --proximal-policy 'interpolate' (flag): what is"),
    ("--use-rollout-logprobs --proximal-policy interpolate",
     "--proximal-policy 'interpolate' (flag) and --use-rollout-logprobs (flag) both name the old policy; use one."),
    ("--use-rs", "--use-rs (flag) needs --use-tis."),
    ("--keep-old-actor --use-rollout-logprobs",
     "--keep-old-actor (flag) and --use-rollout-logprobs (flag) both name the old policy; use one."),
    ("--rollout-buffer-url http://h:1",
     "--rollout-buffer-url 'http://h:1' (flag) is not supported by this version: there is no rollout buffer server;"),
]  # fmt: skip


@sweep("argv, beginning", BROKEN)
def test_contradictions(load: Load, argv: str, beginning: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*argv.split())
    assert str(caught.value).startswith(beginning)


NO_MODEL = (
    "--hf-checkpoint is required: a directory in Hugging Face layout (scripts/models/*.sh take it from HF_CHECKPOINT)."
)
REQUIRED = [
    ("train", "--hf-checkpoint", NO_MODEL),
    ("train", "--prompt-data", "--prompt-data is required: a JSONL or parquet file."),
    ("train", "--rollout-batch-size", "--rollout-batch-size is required: the number of prompts per rollout."),
    ("train", "--num-rollout", "--num-rollout N or --num-epoch N is required."),
    ("train", "--rm-type",
     "no reward: give --rm-type NAME or --custom-rm-path PATH; `slime plugins list` shows the names."),
    ("train", "--rollout-max-response-len",
     "/m: no such directory; --hf-checkpoint names one in Hugging Face's layout, or a model of the hub. Where the"
     " model is elsewhere, --rollout-max-response-len N or --rollout-max-context-len N"
     " says how long an answer may be."),
    ("eval", "--rm-type", "nothing to evaluate: give --eval-prompt-data NAME PATH or --eval-config FILE."),
    ("serve", "--hf-checkpoint", NO_MODEL),
]  # fmt: skip


@pytest.mark.parametrize(("command", "missing", "message"), REQUIRED)
def test_required(load: Load, command: str, missing: str, message: str) -> None:
    from .conftest import BASE

    at = BASE.index(missing)
    with pytest.raises(ConfigError) as caught:
        load(*BASE[:at], *BASE[at + 2 :], base=False, command=command)
    assert str(caught.value) == message


def test_what_other_commands_do_not_need(load: Load) -> None:
    load("--hf-checkpoint", "/m", base=False, command="serve")
    load(base=False, command="show")
    evaluation = ["--hf-checkpoint", "/m", "--eval-prompt-data", "a", "d.jsonl", "--rm-type", "math"]
    with pytest.raises(ConfigError) as caught:
        load(*evaluation, base=False, command="eval")
    assert str(caught.value) == "evaluation of 'a' needs --eval-max-response-len N or --eval-max-context-len N."
    s = load(*evaluation, "--eval-max-response-len", "8", base=False, command="eval")
    assert s.args.eval_datasets[0].max_response_len == 8
    rollout = "--hf-checkpoint /m --prompt-data d --rollout-batch-size 2 --rm-type math --rollout-max-response-len 4"
    assert load(*rollout.split(), base=False, command="rollout").args.num_rollout == 1


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["--use-tensorboard"], r"\[tensorboard\]"),
        (["--use-wandb"], r"\[wandb\]"),
        (["--shadow-rm-path", "math"], ""),
        (["--shadow-filter-path", "band"], ""),
        (["--log-samples", "64"], ""),
    ],
)
def test_what_plugins_of_the_bundle_do_is_not_asked_for_in_vain(
    load: Load, monkeypatch: pytest.MonkeyPatch, words: list[str], extra: str
) -> None:
    monkeypatch.setattr("slime_core.config.sections.logging.installed", lambda distribution: None)
    with pytest.raises(ConfigError, match=rf"{words[0]} .*pip install 'slime-rl{extra}'"):
        load(*words)
    load("--log-samples", "none", "--no-use-tensorboard")


def test_the_context_bounds_the_response(load: Load) -> None:
    from .conftest import BASE

    at = BASE.index("--rollout-max-response-len")
    s = load(*BASE[:at], "--rollout-max-context-len", "32", base=False)
    assert (s.args.rollout_max_response_len, s.args.rollout_max_prompt_len) == (31, 31)


def test_generation_may_score_itself(load: Load) -> None:
    from .conftest import BASE

    at = BASE.index("--rm-type")
    load(*BASE[:at], *BASE[at + 2 :], "--custom-generate-function-path", "m.f", base=False)


def test_supervised_fine_tuning(load: Load) -> None:
    argv = ["--hf-checkpoint", "/m", "--prompt-data", "d", "--global-batch-size", "16", "--num-epoch", "2"]
    a = load(*argv, base=False, command="sft").args
    assert (a.rollout_batch_size, a.loss_type, a.compute_advantages_and_returns) == (16, "sft_loss", False)
    assert (a.rollout_function_path, a.eval_function_path) == ("sft", None)
    with pytest.raises(ConfigError, match=r"^--eval-interval 1 \(flag\): slime sft runs no engine"):
        load(*argv, "--eval-interval", "1", "--eval-prompt-data", "a", "b", base=False, command="sft")
    with pytest.raises(ConfigError, match=r"^--n-samples-per-prompt 2 \(flag\): supervised fine-tuning takes one"):
        load(*argv, "--n-samples-per-prompt", "2", base=False, command="sft")


REFUSED = [
    ("--use-opd", r"--use-opd .* needs --opd-type local"),
    ("--use-opd --opd-type local", r"needs --opd-teacher-load DIR"),
    ("--use-opd --opd-type megatron", r"needs --opd-teacher-load DIR"),
    ("--use-opd --opd-type sglang --opd-teacher-load /t", r"--opd-teacher-load '/t' .* is for --opd-type local"),
    ("--use-opd --opd-type self --opd-teacher-load /t", r"is for --opd-type local; .* with self it is the actor"),
    ("--opd-teacher-load /t", r"--opd-teacher-load '/t' .* needs --use-opd"),
    ("--lora-alpha 8", r"--lora-alpha 8.0 \(flag\): without --lora-rank N there are no adapters"),
    ("--lora-target-modules q_proj --lora-unmerged", "--lora-target-modules 'q_proj' .*, --lora-unmerged .*without"),
    ("--lora-rank 8 --lora-dropout 0.1", r"--lora-dropout 0.1 \(flag\): .*only 0"),
    ("--lora-rank 0", "--lora-rank '0'"),
    ("--lora-rank 8 --lora-alpha 0", "--lora-alpha '0'"),
    (
        "--async --colocate",
        r"--async \(flag\) and --colocate \(flag\) exclude each other: trainer and engines work",
    ),
    ("--async --offload-train", r"--async \(flag\) and --offload-train \(flag\) exclude each other"),
    ("--async --true-on-policy-mode", r"--async .* --true-on-policy-mode .* exclude each other"),
    ("--async --max-staleness 0", r"--max-staleness 0 \(flag\): --async-mode one-step .* so 1 is the least"),
    ("--async --max-staleness 2 --partial-rollout", r"need --staleness-policy mask in --async-mode one-step"),
    ("--async --async-mode full --rollout-function-path sft", r"--async-mode 'full' .* calls no rollout function"),
    ("--async --async-mode two-step", r"--async-mode 'two-step'"),
    ("--async --update-weights-interval 0", r"--update-weights-interval '0'"),
    ("--debug-train-only", r"--debug-train-only.* needs --load-debug-rollout-data FILE"),
    ("--load-debug-rollout-data-subsample 0.5", r"needs --load-debug-rollout-data FILE"),
    ("--debug-rollout-only --load-debug-rollout-data d/{rollout_id}", r"--debug-rollout-only.*contradicts"),
    ("--save-debug-rollout-data d/{step}", r"the only placeholder is \{rollout_id\}"),
    ("--save-debug-rollout-data d/{rollout_id.step}", r"the only placeholder is \{rollout_id\}"),
    ("--save-hf d/{step} --save s --save-interval 1", r"--save-hf.*the only placeholder"),
    ("--save-debug-train-data d.jsonl", r"overwrite each other; put \{rollout_id\} into it"),
    ("--save-debug-rollout-data d/{rollout_id} --save-debug-train-data ./d/{rollout_id}", r"are the same file"),
    ("--save-debug-rollout-data d/{rollout_id} --load-debug-rollout-data d/{rollout_id}", r"are the same file"),
]


@sweep("argv, message", REFUSED)
def test_refused_with_flag_and_value(load: Load, argv: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*argv.split())


WARNINGS = [
    ("--opd-kl-coef 0.5 --opd-type sglang",
     ["--opd-type 'sglang' (flag) has no effect without --use-opd.",
      "--opd-kl-coef 0.5 (flag) has no effect without --use-opd."]),
    ("--group-timeout-policy drop", ["--group-timeout-policy 'drop' (flag) has no effect without --group-timeout."]),
    ("--group-timeout 5 --group-timeout-policy drop --group-timeout-retries 3",
     ["--group-timeout-retries 3 (flag) has no effect without --group-timeout-policy retry."]),
    ("--group-timeout 5 --group-timeout-policy retry --group-timeout-retries 3", []),
    ("--use-tis --use-rs --normalize-advantages", []),
    ("--num-epoch 2", ["--num-epoch 2 (flag) has no effect with --num-rollout 3 (flag)."]),
    ("--kl-loss-coef 0.1", ["--kl-loss-coef 0.1 (flag) has no effect without --use-kl-loss."]),
    ("--use-unbiased-kl --kl-loss-type k3",
     ["--use-unbiased-kl (flag) has no effect without --use-kl-loss.",
      "--kl-loss-type 'k3' (flag) has no effect without --kl-coef or --use-kl-loss."]),
    ("--use-kl-loss --use-unbiased-kl --kl-loss-type k3", []),
    ("--kl-coef 0.1 --kl-loss-type k3",
     ["--kl-loss-type 'k3' (flag) with --kl-coef 0.1 (flag): in the reward only k1 has the KL's gradient on average"
      " (docs/concepts/kl.md)."]),
    ("--rollout-top-p 0.9 --rollout-top-k 20",
     ["--rollout-top-p 0.9 (flag), --rollout-top-k 20 (flag): tokens are drawn from a part of the vocabulary and"
      " trained as if drawn from all of it, which no metric shows; --use-sampling-mask trains them as they are drawn,"
      " and --eval-top-p and --eval-temperature shape evaluations alone."]),
    ("--rollout-top-p 0.9 --use-sampling-mask", []),
    ("--use-sampling-mask",
     ["--use-sampling-mask (flag) has no effect without --rollout-top-p or --rollout-top-k."]),
    ("--use-opsm", ["--use-opsm (flag) has no effect with --num-steps-per-rollout 1 (derived: rollout_batch_size *"
                    " n_samples_per_prompt / global_batch_size): the only step starts at its old policy; take more"
                    " steps, or take the engine's for old with --use-rollout-logprobs."]),
    ("--use-opsm --use-rollout-logprobs", []),
    ("--use-tis --rs-level sequence --rs-tr-threshold 0.1 --tis-lower-bound 0.5",
     ["--rs-level 'sequence' (flag) has no effect without --use-rs.",
      "--tis-lower-bound 0.5 (flag) has no effect on the weights with --tis-mode 'truncate' (default).",
      "--rs-tr-threshold 0.1 (flag) has no effect without --rs-trust-region."]),
    ("--use-tis --use-rs --rs-level sequence --tis-lower-bound 0.5", []),
    ("--custom-rm-path m.f", ["--rm-type 'math' (flag) has no effect with --custom-rm-path 'm.f' (flag)."]),
    ("--train-env-vars {} --release-train --mtp-loss-scaling-factor 0.2",
     ["without effect in this version: --release-train (flag)"]),
    ("--min-lr 1e-7",
      ["--min-lr 1e-07 (flag) has no effect with --lr-decay-style 'constant' (default): nothing decays."]),
    ("--use-dynamic-batch-size --max-tokens-per-gpu 64 --micro-batch-size 2",
     ["--micro-batch-size 2 (flag) has no effect with --use-dynamic-batch-size (flag)."]),
    ("--train-backend embedded --rollout-engine embedded --swiglu --sglang-mem-fraction-static 0.8",
     ["without effect with --train-backend embedded and --rollout-engine embedded: --swiglu (flag),"
      " --sglang-mem-fraction-static 0.8 (flag)"]),
]  # fmt: skip


@sweep("argv, warnings", WARNINGS)
def test_warnings(load: Load, argv: str, warnings: list[str]) -> None:
    assert load(*argv.split()).warnings == warnings


@pytest.mark.parametrize("transport", ["tensor", "distributed", "mine.py"])
def test_a_mode_is_the_transport_of_that_name(load: Load, transport: str) -> None:
    with pytest.raises(ConfigError, match="goes by files"):
        load("--update-weight-mode", "delta", "--update-weight-transport", transport)
    for beside in ("auto", "nccl", "disk", "delta"):
        args = load("--update-weight-mode", "delta", "--update-weight-transport", beside).args
        assert args.update_weight_transport == "delta"


# -- asynchronous runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--max-staleness 2", "--max-staleness 2 (flag) has no effect without --async,"),
        ("--eval-in-background", "--eval-in-background (flag) has no effect without --async,"),
        ("--update-weights-interval 5 --colocate", "--update-weights-interval 5 (flag) has no effect without --async,"),
        ("--async --async-buffer-groups 8", "--async-buffer-groups 8 (flag) has no effect with --async-mode one-step"),
        ("--async --staleness-policy drop", "--staleness-policy 'drop' (flag) has no effect without --max-staleness."),
        ("--async --eval-in-background", "--eval-in-background (flag) has no effect without --eval-interval."),
        ("--async --debug-rollout-only", "--async (flag) has no effect with --debug-rollout-only"),
    ],
)
def test_without_effect(load: Load, flags: str, warning: str) -> None:
    assert [w for w in load(*flags.split()).warnings if w.startswith(warning)]


@pytest.mark.parametrize(
    "flags",
    [
        "--async --update-weights-interval 3 --max-staleness 1",
        "--async --max-staleness 2 --partial-rollout --staleness-policy mask",
        "--async --async-mode full --max-staleness 0 --staleness-policy drop --async-buffer-size 2",
    ],
)
def test_accepted(load: Load, flags: str) -> None:
    assert not [w for w in load(*flags.split()).warnings if "async" in w or "stale" in w]


def test_the_buffer_holds_a_batch_unless_told_otherwise(load: Load) -> None:
    settings = load("--async", "--async-mode", "full")
    assert settings.args.async_buffer_groups == settings.args.rollout_batch_size
    assert str(settings.origins["async_buffer_groups"]) == "derived: rollout_batch_size"


def test_the_buffer_counts_rollouts(load: Load) -> None:
    """1 is one-step; more is continuous generation."""
    one, more = load("--async", "--async-buffer-size", "1"), load("--async", "--async-buffer-size", "4")
    assert (one.args.async_mode, more.args.async_mode) == ("one-step", "full")
    assert more.args.async_buffer_groups == 4 * more.args.rollout_batch_size
    assert str(more.origins["async_mode"]) == "derived: async_buffer_size 4"
    with pytest.raises(ConfigError, match=r"has one rollout ahead; choose --async-mode full"):
        load("--async", "--async-buffer-size", "4", "--async-mode", "one-step")
    with pytest.raises(ConfigError, match="are both set; use one"):
        load("--async", "--async-mode", "full", "--async-buffer-size", "4", "--async-buffer-groups", "8")


@pytest.mark.parametrize("key", ["async", "async_training"])
def test_files_and_variables_may_spell_it_as_the_flag_is(load: Load, tmp_path: Path, key: str) -> None:
    (tmp_path / "run.yaml").write_text(f"{key}: true\n")
    settings = load("--config", str(tmp_path / "run.yaml"))
    assert settings.args.async_training
    assert settings.cite("async_training") == f"--async ({tmp_path}/run.yaml:1)"
    again = tmp_path / "again.yaml"
    again.write_text(settings.to_yaml(changed=True))
    assert load_settings(["--config", str(again)], env={}).args.async_training


# -- dumps and half a loop -------------------------------------------------------------------------------------


def test_loading_means_training_only_and_needs_neither_data_nor_reward() -> None:
    argv = "--hf-checkpoint /m --rollout-batch-size 4 --num-rollout 2 --load-debug-rollout-data d/{rollout_id}.jsonl"
    s = load_settings(argv.split(), env={})
    assert s.args.debug_train_only
    assert str(s.origins["debug_train_only"]) == "derived: load_debug_rollout_data"
    assert any("nothing is generated" in w for w in s.warnings)


def test_dump_details_names_both_dumps_unless_they_are_named(load: Load) -> None:
    s = load("--dump-details", "D", "--save-debug-train-data", "t/{rollout_id}")
    assert s.args.save_debug_rollout_data == "D/rollout_data/{rollout_id}.jsonl"
    assert s.args.save_debug_train_data == "t/{rollout_id}"


def test_rollouts_without_training_are_saved_in_the_run_directory(load: Load) -> None:
    s = load("--debug-rollout-only", "--save", "out", "--save-interval", "1", "--load", "out")
    assert s.args.save_debug_rollout_data == "out/rollouts/rollout_{rollout_id:07d}.jsonl"
    assert sum("nothing is trained" in w for w in s.warnings) == 2


def test_a_name_that_promises_a_pickle_is_warned_about(load: Load) -> None:
    s = load("--save-debug-rollout-data", "d/{rollout_id}.pt")
    assert any("JSON lines" in w for w in s.warnings)


@pytest.mark.parametrize("command", ["rollout", "eval"])
def test_commands_that_do_not_train_refuse_saved_samples(command: str) -> None:
    argv = "--hf-checkpoint /m --prompt-data p --rollout-batch-size 4 --load-debug-rollout-data d/{rollout_id}"
    with pytest.raises(ConfigError, match=rf"slime {command} does not train; use slime train"):
        load_settings(argv.split(), command=command, env={})
