from __future__ import annotations

from pathlib import Path

import pytest
from slime_engine_vllm.engine import VllmEngine
from slime_engine_vllm.environment import SERVER_SIDE, untested
from slime_engine_vllm.launch import make_plan, to_argv

from slime_core.config import Args, load_settings
from slime_core.errors import ConfigError


def settings(line: str = "") -> Args:
    return load_settings(
        ["--rollout-engine", "vllm", "--hf-checkpoint", "/m", *line.split()], command="serve", env={}
    ).args


def test_servers_share_the_gpus() -> None:
    args = settings("--rollout-num-gpus 4 --rollout-num-gpus-per-engine 2 --vllm-max-model-len 512 --seed 7")
    plan = make_plan(args.model_copy(update={"actor_num_gpus_per_node": 2}), num_gpus=8)
    assert [server.gpus for server in plan.servers] == [(2, 3), (4, 5)]
    assert [server.arguments["seed"] for server in plan.servers] == [7, 9]
    for server in plan.servers:
        assert server.arguments["tensor_parallel_size"] == 2
        assert server.arguments["max_model_len"] == 512
        assert "enforce_eager" not in server.arguments


def test_a_server_takes_adapters_of_the_runs_rank() -> None:
    (server,) = make_plan(settings("--lora-rank 12 --lora-unmerged --device cpu")).servers
    assert (server.arguments["enable_lora"], server.arguments["max_lora_rank"]) == (True, 16)
    assert server.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    with pytest.raises(ConfigError, match="--lora-rank 513: vLLM adds adapters of rank 512 at most"):
        make_plan(settings("--lora-rank 513 --lora-unmerged --device cpu"))
    (server,) = make_plan(settings("--lora-rank 8 --lora-adapters a b --lora-unmerged --device cpu")).servers
    assert server.arguments["max_loras"] == 3
    (server,) = make_plan(settings("--lora-rank 12 --device cpu")).servers
    assert "enable_lora" not in server.arguments


def test_adapters_are_chosen_where_the_server_adds_them() -> None:
    argv = ["--rollout-engine", "vllm", "--hf-checkpoint", "/m", "--lora-rank", "8", "--lora-adapters", "a", "b"]
    with pytest.raises(ConfigError, match=r"--lora-adapters 'a' 'b'.* type --lora-unmerged"):
        VllmEngine.check_settings(load_settings(argv, command="serve", env={}))


def test_a_server_on_cpu_computes_from_its_parameters() -> None:
    (server,) = make_plan(settings("--device cpu --no-vllm-enable-prefix-caching")).servers
    words = to_argv(server.arguments)
    assert words[:3] == ["--dtype", "float32", "--enforce-eager"]
    assert "--no-enable-prefix-caching" in words
    assert words[-2:] == ["--weight-transfer-config", '{"backend": "slime"}']
    assert server.environment["PLAIN_LINEAR_ON_CPU"] == "1"
    assert server.environment["PYTHONPATH"].split(":")[0] == str(SERVER_SIDE / "plugin")


@pytest.mark.parametrize(
    ("line", "gpus", "said"),
    [
        ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", 8, "--rollout-num-gpus 3 is no multiple of"),
        ("--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2 --vllm-pipeline-parallel-size 3", 8, "does not divide"),
        ("--rollout-num-gpus 16", 16, "are started on one machine"),
        ("--rollout-num-gpus 9", 8, "needs 9 GPUs, but 8 are visible"),
    ],
)
def test_plans_that_cannot_work(line: str, gpus: int, said: str) -> None:
    args = settings(line).model_copy(update={"actor_num_gpus_per_node": 0})  # as `slime eval` has it
    with pytest.raises(ConfigError, match=said):
        make_plan(args, num_gpus=gpus)


def test_versions() -> None:
    assert untested("0.32.0") == untested("0.32.0+cpu") == ""
    assert "not with 0.31.2. To have one of them, type: pip install vllm==0.32.0" in untested("0.31.2")


def test_the_servers_side_imports_nothing_of_slime() -> None:
    for file in SERVER_SIDE.rglob("*.py"):
        text = file.read_text()
        assert "slime_core" not in text, file
        assert "slime_engine" not in text, file
    assert Path(SERVER_SIDE / "plugin/slime_vllm_plugin-0.1.dist-info/entry_points.txt").is_file()
