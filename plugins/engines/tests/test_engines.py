"""vLLM servers: their plans and their wire format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from slime_engine_vllm.engine import VllmEngine
from slime_engine_vllm.environment import SERVER_SIDE, untested
from slime_engine_vllm.launch import make_plan, to_argv
from slime_engine_vllm.wire import VllmWire
from slime_testing_contracts import CommandContract

from slime_core.config import Args, load_settings
from slime_core.errors import ConfigError, EngineError


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


URL = "http://h:1"
BODY = {"rid": "r~", "input_ids": [3, 4], "sampling_params": {"max_new_tokens": 9}}


def wire() -> VllmWire:
    return VllmWire(lambda ids, params: f"{len(ids)} {params.get('matched')}")


def choice(*ids: int, reason: str | None = None, **more: Any) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -0.5} for token in ids]
    return {"choices": [{"token_ids": list(ids), "logprobs": {"content": content}, "finish_reason": reason, **more}]}


@pytest.mark.parametrize(
    ("params", "sent"),
    [
        (
            {"max_new_tokens": 4, "min_new_tokens": 2, "sampling_seed": 7, "top_k": -1, "top_p": 0.9},
            {"max_tokens": 4, "min_tokens": 2, "seed": 7, "top_k": 0, "top_p": 0.9},
        ),
        (
            {"top_k": 5, "temperature": 0.0, "stop_token_ids": [3]},
            {"top_k": 5, "temperature": 0.0, "stop_token_ids": [3]},
        ),
        ({"stop": ["x"], "no_stop_trim": True}, {"stop": ["x"], "detokenize": True}),
        ({"regex": "a+", "json_schema": None}, {"structured_outputs": {"regex": "a+"}}),
        ({"json_schema": "{}"}, {"structured_outputs": {"json": "{}"}}),
    ],
)
def test_parameters_get_vllms_names(params: dict[str, Any], sent: dict[str, Any]) -> None:
    wire().check(params)
    body = wire().request({**BODY, "sampling_params": params, "extra_key": "v3"})
    assert body["sampling_params"] == {"logprobs": 0, "detokenize": False, **sent}
    assert (body["request_id"], body["token_ids"], body["cache_salt"]) == ("r~", [3, 4], "v3")


def test_requests_name_an_adapter_once_there_is_one() -> None:
    held: list[list[str]] = []
    wire = VllmWire(lambda ids, params: "", lambda: held[0] if held else None)
    assert "model" not in wire.request(BODY)
    with pytest.raises(EngineError, match="adapter 'solver' is not served; servers have: none"):
        wire.request({**BODY, "lora_path": "solver"})
    held.append(["solver"])
    assert wire.request(BODY)["model"] == "slime-adapter"
    assert wire.request({**BODY, "lora_path": "solver"})["model"] == "slime-adapter.solver"
    with pytest.raises(EngineError, match="adapter 'critic' is not served; servers have: solver"):
        wire.request({**BODY, "lora_path": "critic"})
    told = (SERVER_SIDE / "plugin/slime_vllm_plugin/adapters.py").read_text()
    assert 'ADAPTER = "slime-adapter"' in told, "the server's side imports nothing of slime"


@pytest.mark.parametrize("name", ["stop_regex", "custom_params", "beam_width", "stream_interval"])
def test_parameters_of_sglang_alone_are_refused(name: str) -> None:
    with pytest.raises(EngineError, match=f"vLLM has no '{name}'"):
        wire().check({name: 1, "temperature": 1.0})
    wire().check({name: None})


def test_pieces_become_one_answer() -> None:
    reader = wire().reader(URL, BODY)
    assert reader.add(choice(5, 6)).meta_info["finish_reason"] is None
    spans = [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 3}]
    output = reader.add(choice(7, reason="length", weight_versions=spans) | {"usage": {"prompt_tokens": 2}})
    assert (output.token_ids, output.log_probs, output.text) == ([5, 6, 7], [-0.5] * 3, "3 None")
    assert output.meta_info["finish_reason"] == {"type": "length", "length": 3}
    assert output.meta_info["token_weight_versions"] == [2, 3, 3]
    assert output.meta_info["weight_version"] == "3"


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_an_answer_of_no_token_is_asked_for_as_one_of_one(reason: str) -> None:
    body = {**BODY, "sampling_params": {"max_new_tokens": 0}}
    assert wire().request(body)["sampling_params"]["max_tokens"] == 1
    output = wire().reader(URL, body).add(choice(5, reason=reason))
    assert (output.token_ids, output.log_probs) == ([], [])
    assert output.meta_info["finish_reason"] == {"type": "length", "length": 0}
    assert output.meta_info["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (choice(5, reason="stop", stop_reason=None), {"type": "stop", "matched": 5}),  # the model's own end
        (choice(5, 8, reason="stop", stop_reason=8), {"type": "stop", "matched": 8}),
        (choice(5, reason="stop", stop_reason="x"), {"type": "stop", "matched": "x"}),
        (choice(reason="abort"), {"type": "abort", "message": "aborted by the server"}),
    ],
)
def test_finish_reasons(answer: dict[str, Any], reason: dict[str, Any]) -> None:
    assert wire().reader(URL, BODY).add(answer).meta_info["finish_reason"] == reason


@pytest.mark.parametrize(
    "answer", [{}, {"choices": [{}]}, choice(5) | {"choices": [{"token_ids": [5], "logprobs": None}]}, "text"]
)
def test_an_answer_of_another_form_is_one_error(answer: Any) -> None:
    with pytest.raises(EngineError, match=r"h:1/inference/v1/generate: .*choices with token_ids"):
        wire().reader(URL, BODY).add(answer)


def test_a_request_that_failed_in_the_server_is_tried_again() -> None:
    with pytest.raises(EngineError) as caught:
        wire().reader(URL, BODY).add(choice(reason="error"))
    assert caught.value.status == 500


class TestEngines(CommandContract):
    component = "engines"
