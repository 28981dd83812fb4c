"""Which trainer and which engine a command means that names neither, and what a missing one says."""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from slime_rewards.processes.messages import pack_args, unpack_args

from slime_core.cli import main as frame
from slime_core.config import Settings, load_settings
from slime_core.errors import ConfigError
from tests.conftest import TinyRun

RUN = "--hf-checkpoint m --prompt-data p --rm-type math --rollout-batch-size 2 --num-rollout 1"


def load(words: str, command: str = "train", **env: str) -> Settings:
    return load_settings([*RUN.split(), "--rollout-max-response-len", "8", *words.split()], command=command, env=env)


CHOSEN = [
    ("", "embedded (default)", "embedded (default)"),
    ("--num-threads 1 --colocate", "embedded (default)", "embedded (default)"),
    ("--train-backend auto", "embedded (auto)", "embedded (default)"),
    ("--tensor-model-parallel-size 2", "megatron (auto: because of --tensor-model-parallel-size)",
     "embedded (default)"),
    ("--context-parallel-size=1 --swiglu", "megatron (auto: because of --context-parallel-size)", "embedded (default)"),
    ("--disable-bias-linear", "megatron (auto: because of --disable-bias-linear)", "embedded (default)"),
    ("--actor-num-gpus-per-node 4 --rollout-num-gpus 4", "megatron (auto: because of --actor-num-gpus-per-node)",
     "sglang (auto: because of --rollout-num-gpus)"),
    ("--colocate --actor-num-gpus-per-node 8", "megatron (auto: because of --actor-num-gpus-per-node)",
     "sglang (auto: because of --colocate and --actor-num-gpus-per-node)"),
    ("--sglang-mem-fraction-static 0.8", "embedded (default)",
     "sglang (auto: because of --sglang-mem-fraction-static)"),
    ("--router-policy random", "embedded (default)", "sglang (auto: because of --router-policy)"),
    ("--rollout-num-gpus 0", "embedded (default)", "sglang (auto: because of --rollout-num-gpus)"),
    ("--sglang-server-concurrency 64", "embedded (default)", "embedded (default)"),  # every engine's
    ("--model qwen3-4B", "embedded (default)", "embedded (default)"),  # says it to every trainer
    ("--train-backend embedded --rollout-engine http --num-layers 2 --rollout-num-gpus 1", "embedded (flag)",
     "http (flag)"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "trainer", "engine"), CHOSEN)
def test_what_is_given_chooses(words: str, trainer: str, engine: str) -> None:
    s = load(words)
    for name, expected in (("train_backend", trainer), ("rollout_engine", engine)):
        assert f"{getattr(s.args, name)} ({s.origins[name]})" == expected


def test_what_was_chosen_is_what_is_shown_and_stored(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--tensor-model-parallel-size", "2", "--rollout-num-gpus", "2"]
    assert frame.main(["config", "show", "--json", *words]) == 0
    shown = json.loads(capsys.readouterr().out)["train_backend"]
    assert shown == {"value": "megatron", "origin": "auto: because of --tensor-model-parallel-size"}
    stored = tmp_path / "config.yaml"
    stored.write_text(load("").to_yaml())  # every value, GPUs too: they are no wish of whoever loads it
    again = load(f"--config {stored}")
    assert (again.args.train_backend, again.args.rollout_engine) == ("embedded", "embedded")
    stored.write_text(load(" ".join(words)).to_yaml())
    again = load(f"--config {stored}")
    assert (again.args.train_backend, again.args.rollout_engine) == ("megatron", "sglang")


def test_a_trainer_that_splits_no_model_refuses_to_be_asked_for_it() -> None:
    sizes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --expert-model-parallel-size 4"
    with pytest.raises(ConfigError) as refused:
        load(f"--train-backend embedded {sizes}")
    assert str(refused.value).splitlines() == [
        f"--{name}-model-parallel-size {size} (flag): --train-backend 'embedded' (flag) splits no model; remove it, or"
        " type --train-backend megatron."
        for name, size in (("tensor", 2), ("expert", 4))
    ]
    (warning,) = load(f"--train-backend embedded {sizes}", command="rollout").warnings  # trains nothing
    assert warning.startswith("without effect with --train-backend embedded")


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed beside slime")
def test_what_is_not_installed_is_said_once_with_the_way_without(
    tiny: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLIME_ENGINE_PYTHON", raising=False)
    monkeypatch.setitem(sys.modules, "megatron", None)  # as where there is none
    argv = [*tiny.argv(tmp_path / "run"), "--num-layers", "2", "--rollout-num-gpus", "4"]
    assert frame.main(["train", *argv]) == 2
    engine, trainer, way = capsys.readouterr().err.splitlines()
    assert engine.startswith(
        "slime: error: --rollout-engine 'sglang' (auto: because of --rollout-num-gpus): SGLang is not installed"
    )
    assert "--train-backend 'megatron' (auto: because of --num-layers): megatron-core is not installed" in trainer
    assert 'pip install "megatron-core==' in trainer
    assert way.strip() == "Or go on without: type --rollout-engine embedded --train-backend embedded"
    assert not (tmp_path / "run").exists()


def test_code_written_for_megatron_finds_its_arguments_with_every_trainer(tiny: TinyRun) -> None:
    for extra in ((), ("--train-backend", "megatron", "--context-parallel-size", "1")):
        settings = load_settings([*tiny.argv(), *extra], env={})
        args: Any = unpack_args(pack_args(settings.args))  # as a worker process of rewards has it
        assert pickle.loads(pickle.dumps(settings.args)).context_parallel_size == 1
        assert (args.context_parallel_size, args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (
            1,
            1,
            1,
        )
        assert (args.sequence_parallel, args.use_distributed_optimizer, args.hidden_dropout) == (False, True, 0.0)
        assert (args.world_size, args.rank, args.data_parallel_size, args.seq_length) == (1, 0, 1, 4096)
        model = json.loads((tiny.root / "model" / "config.json").read_text())
        assert (args.num_layers, args.hidden_size, args.vocab_size) == (
            model["num_hidden_layers"], model["hidden_size"], model["vocab_size"],
        )  # fmt: skip
        assert (args.num_experts, args.norm_epsilon) == (None, model["rms_norm_eps"])
        assert not hasattr(args, "tensor_model_paralel_size")
        assert "tensor_model_parallel_size" not in settings.to_dict()  # a default is not a wish


def test_flags_of_another_model_than_the_checkpoint_are_told_with_every_trainer(tiny: TinyRun) -> None:
    flags = "--train-backend embedded --rollout-engine embedded --num-layers 36 --hidden-size 2560 --seq-length 4096"
    warnings = load_settings([*tiny.argv(), *flags.split()], env={}).warnings
    (told,) = [warning for warning in warnings if "is another model than the flags describe" in warning]
    assert "--num-layers 36: the model has 2 (num_hidden_layers)" in told
    assert "--hidden-size 2560: the model has" in told
    agreeing = [*tiny.argv(), *flags.replace("36", "2").replace("--hidden-size 2560", "").split()]
    assert not [warning for warning in load_settings(agreeing, env={}).warnings if "another model" in warning]
