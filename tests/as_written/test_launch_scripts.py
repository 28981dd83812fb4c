"""THUDM/slime's launch scripts as they are: `slime check --flags-only` and the trainer, once it knows the model, accept
them, or say why not."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from slime_commands.check.check import check_flags
from slime_commands.models.presets import find_preset
from slime_trainer_megatron.checks import check_run
from slime_trainer_megatron.trainer import MegatronTrainer

from slime_core.config import Settings
from slime_core.errors import ConfigError, PluginError
from slime_core.models.hf_io import write_config
from tests.as_written.launch_scripts import EXCEPTIONS, MODELS, NOT_REHEARSED, WHEN_STARTED, launch_scripts, verdicts
from tests.conftest import Slime

SCRIPTS = launch_scripts()
TRAINS_ALONE = "--debug-train-only"


QUICK = {*EXCEPTIONS, *list(SCRIPTS)[::12]}
"""Those that are not simply accepted, and some that are."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS]
)
def test_a_script_gets_the_backends_it_names_or_a_reason(name: str, tmp_path: Path) -> None:
    verdict, argv = verdicts()[name], SCRIPTS[name]
    named = re.findall(r"`(--[a-z-]+)`", verdict.why)
    while verdict.kind == "refused" and named:
        with pytest.raises((ConfigError, PluginError), match=re.escape(named[0])):
            check_flags(argv)
        argv = _without(argv, named.pop(0))
    settings = check_flags(argv)
    assert settings.args.train_backend == "megatron"
    assert settings.args.rollout_engine == ("embedded" if TRAINS_ALONE in argv else "sglang")
    (idle,) = [w for w in settings.warnings if w.startswith("without effect in this version")] or [""]
    assert [flag for flag in named if flag not in idle] == []
    assert verdict.kind == "refused" or bool(idle) is (verdict.kind == "differs")
    if name in MODELS:
        _check_with_model(name, settings, tmp_path)


def _check_with_model(name: str, settings: Settings, directory: Path) -> None:
    """What the trainer says of the flags once the checkpoint's config.json is there, on GPUs."""
    write_config(directory, dict(find_preset(MODELS[name]).config))
    settings.args.hf_checkpoint, settings.args.device = str(directory), "cuda"
    if name in WHEN_STARTED:
        assert verdicts()[name].kind == "refused"
        with pytest.raises((ConfigError, PluginError), match=re.escape(WHEN_STARTED[name])):
            _start_checks(settings)
    else:
        _start_checks(settings)


def _start_checks(settings: Settings) -> None:
    check_run(settings.args)
    MegatronTrainer.processes(settings)


def _without(argv: list[str], flag: str) -> list[str]:
    at = argv.index(flag)
    end = next((i for i in range(at + 1, len(argv)) if argv[i].startswith("--")), len(argv))
    return argv[:at] + argv[end:]


@pytest.mark.slow
def test_the_command(slime: Slime) -> None:
    done = slime("check", "--flags-only", "--json", *SCRIPTS["scripts_run-qwen3-4B.sh"])
    assert '"level": "ok"' in done.stdout
    assert "--train-backend 'megatron' (auto: because of --swiglu)" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_rehearsed(name: str, slime: Slime, tmp_path: Path) -> None:
    """Rehearse the script to its end, in two processes at most; the data are elsewhere."""
    options = ["--stand-ins", "--json", "--processes", "2", "--seconds", "300"]
    done = slime("rehearse", *options, *SCRIPTS[name], check=False, timeout=900, SLIME_ENGINE_PYTHON="")
    report = json.loads(done.stdout)
    errors = [(p["stage"], p["message"]) for p in report["problems"] if p["level"] == "error"]
    if name in NOT_REHEARSED:
        stage, words = NOT_REHEARSED[name]
        assert [stage] == list(dict.fromkeys(of for of, _ in errors)), errors
        assert any(words in message for _, message in errors), errors
    else:
        assert errors == []
        assert report["stages"][-1]["stage"] == "resume"
    assert done.returncode == int(name in NOT_REHEARSED)


OTHER = "--hf-checkpoint /m --prompt-data /p --rm-type math --rollout-batch-size 8 --rollout-max-response-len 9"


@pytest.mark.parametrize(
    ("words", "attribute", "value"),
    [
        ("--num-rollout=3 --num-rollout=5", "num_rollout", 5),
        ("--num-rollout 5 --context-parallel-size=2 --context-parallel-size 4", "context_parallel_size", 4),
        ("--num-rollout 5 --sglang-mem-fraction 0.5", "sglang_mem_fraction_static", 0.5),  # SGLang's parser: beginnings
        ("--num-rollout 5 --sglang-mamba-scheduler-strategy extra_buffer", "sglang_mamba_radix_cache_strategy",
         "extra_buffer"),
        ("--num-rollout 5 --sglang-nsa-decode-backend fa3", "sglang_dsa_decode_backend", "fa3"),
        ("--num-rollout 5 --no-position-embedding --tokenizer-type HuggingFaceTokenizer", "no_position_embedding",
         True),
        ("--num-rollout 5 --mtp-num-layers 1 --model-name qwen3", "mtp_num_layers", 1),
        ("--num-rollout 5 --use-pytorch-profiler --profile-step-end 9 --tensorboard-queue-size 5 --log-params-norm"
         " --dist-ckpt-strictness log_all --exit-signal-handler --split 99,1,0 --logging-level 20",
         "profile_step_end", 9),
    ],
)  # fmt: skip
def test_other_scripts(words: str, attribute: str, value: object) -> None:
    args = check_flags(shlex.split(f"{OTHER} {words}")).args
    assert getattr(args, attribute) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--tensor-model-parallel 2",
            "unknown flag --tensor-model-parallel. Did you mean --tensor-model-parallel-size?",
        ),
        ("--sglang-mem 0.5 --num-rollout 1 --sglang-enable 1", "has no such flag"),  # beginning of several
        ("--data-path corpus --num-rollout 1", "--data-path corpus (flag): set --prompt-data"),
        ("--checkpoint-activations --num-rollout 1", "--checkpoint-activations (flag): set --recompute-granularity"),
        ("--enable-mtp-training --num-rollout 1", "layers for multi-token prediction are not trained"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_with_what_to_do(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_flags([*OTHER.split(), *words.split()])


@pytest.mark.parametrize(
    ("name", "family"),
    [("qwen3.5-9B", "qwen3_5"), ("qwen3.5-35B-A3B", "qwen3_5_moe"), ("glm5.2-744B-A40B", "glm_moe_dsa"),
     ("qwen3-next-80B-A3B", None), ("moonlight", None)],
)  # fmt: skip
def test_a_model_is_refused_by_name_or_numbers_if_its_family_has_no_plugin(name: str, family: str | None) -> None:
    numbers = [word for flag, value in find_preset(name).flags().items() for word in _words(flag, value)]
    for words in (["--model", name, "--train-backend", "megatron"], numbers):
        argv = [*OTHER.split(), "--num-rollout", "1", *words]
        if family is not None:
            with pytest.raises(PluginError) as refused:
                check_flags(argv)
            for named in (name, f"no megatron_models plugin '{family}'", "qwen3_moe", "--hf-checkpoint"):
                assert named in str(refused.value)
            argv += ["--custom-model-provider-path", "mine.py:provide"]
        assert check_flags(argv).args.train_backend == "megatron"


def _words(name: str, value: object) -> list[str]:
    return [f"--{name}"] if value is True else [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
