"""What `slime plan` says of runs that have not started."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from slime_commands.plan import command
from slime_commands.plan.batch import plan_batches, schedule_in_words
from slime_commands.plan.roofline import seconds
from slime_commands.plan.run_plan import sharding_of

from slime_core.config import Args
from slime_core.models.family import DecoderShape
from slime_core.protocols import TrainerTraits
from tests.conftest import TinyRun


def run_args(**changes: Any) -> Any:
    values = {
        "rollout_batch_size": 32, "n_samples_per_prompt": 8, "global_batch_size": 128, "num_steps_per_rollout": 2,
        "micro_batch_size": 4, "num_rollout": 40, "rollout_max_response_len": 100, "rollout_max_prompt_len": 50,
    }  # fmt: skip
    return Args(**{**values, **changes})


def test_batch_arithmetic() -> None:
    plan = plan_batches(run_args(), data_parallel=4, rows=640)
    assert plan.describe() == [
        "32 prompts x 8 = 256 samples a rollout",
        "2 optimizer steps of 128 samples a rollout",
        "4 data-parallel ranks: 32 samples each a step; micro-batches of 4 samples",
        "a micro-batch has at most 600 tokens, a sample 150",
        "40 rollouts, 80 optimizer steps",
        "640 rows of data: 2 epochs, 20 rollouts each",
    ]


def test_epochs_become_rollouts_and_tokens_bound_micro_batches() -> None:
    args = run_args(num_rollout=None, num_epoch=3, use_dynamic_batch_size=True, max_tokens_per_gpu=4096)
    plan = plan_batches(args, data_parallel=1, context=2, rows=100)
    assert (plan.rollouts, plan.optimizer_steps, plan.micro_batch_tokens) == (9, 18, 8192)
    assert plan.micro_batch == "4,096 tokens per GPU"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "every sample is of the weights that it trains"),
        ({"partial_rollout": True}, "tokens of older weights"),
        ({"async_training": True}, "samples are one weight version old"),
        ({"async_training": True, "update_weights_interval": 2}, "every 2 rollouts"),
        ({"async_training": True, "async_mode": "full"}, "no limit on staleness"),
        (
            {"async_training": True, "async_mode": "full", "max_staleness": 4},
            "groups over 4 weight versions old are regenerated",
        ),
        ({"debug_train_only": True}, "nothing is generated"),
        ({"debug_rollout_only": True}, "nothing is trained"),
    ],
)
def test_schedule_in_words(changes: dict[str, Any], said: str) -> None:
    assert said in "\n".join(schedule_in_words(run_args(**changes)))


def test_sharding_of_trainers() -> None:
    args = Args(dtype="auto")
    assert sharding_of(object, args, 4, gpus=True).data == 4
    assert sharding_of(object, args, 4, gpus=True).compute_bytes == 2
    assert sharding_of(object, args, 4, gpus=False).compute_bytes == 4
    megatron = type("Trainer", (), {"traits": TrainerTraits(reads_megatron=True)})
    args = Args(dtype="bfloat16", tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    found = sharding_of(megatron, args, 8, gpus=True)
    assert (found.tensor, found.pipeline, found.data, found.weight_bytes, found.master_bytes) == (2, 2, 2, 2, 4)
    assert found.spread_optimizer


# -- the command -------------------------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert command.run(list(argv)) == 0
    return capsys.readouterr().out


def test_a_run_in_words(tiny: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, *tiny.argv(), "--device", "cpu", "--gpu-memory-gib", "16")
    for line in (
        "  4 prompts x 4 = 16 samples a rollout",
        "  200 rows of data: 0.08 epochs, 50 rollouts each",
        "  synchronous: generate, train, update weights; every sample is of the weights that it trains",
        "  2 CPU places",
    ):
        assert line in shown.splitlines()
    assert "of 16 GiB: fits" in shown
    assert "KV cache" in shown


def test_offloading_lowers_the_peak_of_shared_devices(tiny: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*flags: str) -> dict[str, Any]:
        argv = [
            *tiny.argv(),
            "--colocate",
            "--rollout-num-gpus",
            "1",
            "--num-gpus",
            "1",
            "--actor-num-gpus-per-node",
            "1",
        ]
        plan = json.loads(said(capsys, *argv, "--json", *flags))
        (shared,) = [m for m in plan["memory"] if m["device"] == "shared devices"]
        return {"bytes": shared["bytes"], "peak": shared["peak"], **{i["name"]: i["bytes"] for i in shared["items"]}}

    both = planned()  # --colocate offloads both
    neither = planned("--no-offload-train", "--no-offload-rollout")
    assert both["bytes"] == max(both["generate"], both["train"], both["push weights"]) < neither["bytes"]
    assert both["train"] < neither["train"]
    assert both["generate"] < neither["generate"]
    assert neither["peak"] == "train"


BIG = (
    "--prompt-data x.jsonl --rm-type math --rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 2"
    " --num-gpus 8 --gpu-memory-gib 80"
)
SERVERS = "--train-backend megatron --rollout-engine sglang"


@pytest.mark.parametrize(
    "named", ["--model qwen3-4B", "--hf-checkpoint Qwen/Qwen3-4B", "--model qwen3-4B --hf-checkpoint nowhere"]
)
def test_a_model_that_is_not_there_is_planned_by_its_preset(named: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(said(capsys, *named.split(), *BIG.split(), "--rollout-max-response-len", "1024", "--json"))
    trainer, engine = plan["memory"]
    assert trainer["items"][0]["bytes"] == 4 * 4_022_468_096, "what slime models show says"
    assert engine["items"][0]["bytes"] == 2 * 4_022_468_096
    assert "numbers of the preset qwen3-4B" in plan["notes"][-1]
    idle = next(note for note in plan["notes"] if "idle" in note)
    assert idle.startswith("6 of 8 GPUs are idle; type --actor-num-gpus-per-node 7")
    assert "--actor-num-gpus-per-node 4 --rollout-num-gpus 4" in idle


def test_a_servers_cache_is_not_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 80 GiB it takes its share, and samples that it has no room for wait."""
    flags = [*f"--model qwen3-4B {BIG} {SERVERS} --actor-num-gpus-per-node 4 --rollout-num-gpus 4".split(),
             "--rollout-max-response-len", "32768"]  # fmt: skip
    shown = said(capsys, *flags, "--sglang-mem-fraction-static", "0.5")
    assert re.search(r"engine, each device of 4: 40 GiB of 80 GiB: fits", shown)
    room = int((0.5 * 80 * 2**30 - 2 * 4_022_468_096) / 147_456) // 65_536
    assert f"for {room} of 64 samples at full length; the rest waits" in shown
    assert "idle" not in shown


def test_time_is_bounded_by_operations_and_bytes() -> None:
    """Of one GPU, by hand: 2 FLOPs a weight and token forward; all weights and half of the cache for each token."""
    shape = DecoderShape(hidden_size=64, intermediate_size=256, vocab_size=1000, num_layers=2, num_heads=4,
                         num_kv_heads=2, head_dim=16)  # fmt: skip
    took = seconds(shape, 10**9, samples=8, prompt=10, response=20, running=4, trainers=2, engines=1, engine_size=1,
                   extra_passes=1)  # fmt: skip
    assert took.train == pytest.approx(8 * 4 * shape.forward_flops(30) / (2 * 0.4 * 989e12))
    read = 2 * 10**9 + 4 * (2 * 2 * 2 * 16 * 2) * (10 + 10)
    prefill = 8 * shape.forward_flops(10) / (0.4 * 989e12)
    assert took.generate == pytest.approx(2 * 20 * read / (0.6 * 3.35e12) + prefill)
