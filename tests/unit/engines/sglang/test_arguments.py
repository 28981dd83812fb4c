from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from slime_engine_sglang import arguments
from slime_engine_sglang.arguments import router_arguments, server_arguments, to_argv
from slime_engine_sglang.flag_list import ROUTER

from slime_core.config import load_settings
from slime_core.errors import ConfigError


@pytest.fixture(autouse=True)
def _shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_engine_sglang.flag_list.find_python", lambda _: None)


def settings(*argv: str, env: dict[str, str] | None = None) -> Any:
    words = ["--hf-checkpoint", "/m", "--rollout-engine", "sglang", *argv]
    return load_settings(words, command="show", env=env or {}).args


def server(*argv: str, device: Any = "cuda", gpus: int = 1, **options: Any) -> dict[str, Any]:
    return server_arguments(settings(*argv), device=device, gpus=gpus, **options)


def test_what_slime_sets() -> None:
    assert server("--seed", "7", gpus=4, rank=2) == {
        "model_path": "/m",
        "enable_metrics": True,
        "skip_server_warmup": True,
        "random_seed": 7 + 2 * 4,
        "tp_size": 4,
    }
    assert server("--sglang-trust-remote-code")["trust_remote_code"] is True
    assert server(model_path="/other")["model_path"] == "/other"


def test_on_cpu_there_are_defaults_that_the_user_may_change() -> None:
    fields = server("--sglang-max-total-tokens", "4k", device="cpu")
    assert {name: fields[name] for name in arguments.ON_CPU} == {
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 4000,
        "mem_fraction_static": 0.3,
        "sleep_on_idle": True,
        "image_processor_backend": "pil",
        "lora_backend": "torch_native",
    }


def test_every_source_reaches_the_fields(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "sglang_mem_fraction_static: 0.8\nsglang_dllm_fdfo: false\nsglang_cuda_graph_bs_decode: [1, 2]\n"
        "sglang_json_model_override_args: {a: 1}\nsglang_log_level: null\n"
    )
    args = settings(
        *("--config", str(file), "--sglang-context-length", "16Ki", "--sglang-cuda-graph-bs", "4", "8"),
        env={"SLIME_SGLANG_ENABLE_LORA": "true", "SLIME_SGLANG_DP_SIZE": "1"},
    )
    fields = server_arguments(args, device="cuda", gpus=1)
    assert (
        fields
        | {
            "mem_fraction_static": 0.8,
            "dllm_fdfo": False,
            "cuda_graph_bs_decode": [4, 8],
            "json_model_override_args": '{"a":1}',
            "context_length": 16384,
            "enable_lora": True,
            "dp_size": 1,
        }
        == fields
    )
    assert "log_level" not in fields, "null is not given"
    assert "sglang_server_concurrency" not in str(fields)


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        ("--sglang-dp 2 --sglang-enable-dp-attention", "dp_size", 2),
        ("--sglang-data-parallel-size 2 --sglang-enable-dp-attention", "dp_size", 2),
        ("--sglang-pipeline-parallel-size 2", "pp_size", 2),
        ("--sglang-expert-parallel-size 4", "ep_size", 4),
        ("--sglang-ep 4", "ep_size", 4),
        ("--sglang-moe-data-parallel-size 2", "moe_dp_size", 2),
    ],
)
def test_long_and_short_names(argv: str, field: str, value: Any) -> None:
    assert server(*argv.split(), gpus=4)[field] == value


def test_sizes_must_fit() -> None:
    assert server("--sglang-pp-size", "2", gpus=8)["tp_size"] == 4
    with pytest.raises(ConfigError) as caught:
        server("--sglang-pp-size", "3", gpus=4)
    assert str(caught.value) == (
        "--sglang-pp-size 3 does not divide the engine's 4 GPUs (--rollout-num-gpus-per-engine, which is"
        " tp_size * pp_size)."
    )
    with pytest.raises(ConfigError) as caught:
        server("--sglang-dp-size", "2", gpus=2)
    assert str(caught.value) == (
        "--sglang-dp-size 2 needs --sglang-enable-dp-attention; for more engines of one copy each set"
        " --rollout-num-gpus."
    )
    with pytest.raises(ConfigError, match=r"^--sglang-dp-size 3 \(m.yaml:3\) does not divide the engine's tp_size 4.$"):
        server("--sglang-enable-dp-attention", gpus=4, overrides={"dp_size": 3}, origin="m.yaml:3")
    with pytest.raises(ConfigError, match=r"^--sglang-attn-dp-size 3 does not divide the engine's tp_size 4.$"):
        server("--sglang-attn-dp-size", "3", gpus=4)


def test_overrides_lie_above_settings_and_below_slime() -> None:
    overrides = {"chunked-prefill-size": 64, "expert_parallel_size": 2, "fp8_gemm_runner_backend": "triton"}
    fields = server("--sglang-chunked-prefill-size", "8", gpus=2, overrides=overrides, origin="m.yaml:3")
    assert (fields["chunked_prefill_size"], fields["ep_size"], fields["tp_size"]) == (64, 2, 2)
    assert fields["fp8_gemm_runner_backend"] == "triton"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"chunked_prefil_size": 1},
            "m.yaml:3: chunked_prefil_size: {} has no such flag. Did you mean chunked_prefill_size?",
        ),
        ({"chunked_prefill_size": "x"}, "m.yaml:3: chunked_prefill_size 'x': invalid int value: 'x'"),
        ({"ep": 1, "ep_size": 2}, "m.yaml:3: 'ep_size' is already set as 'ep'; remove one."),
        ({"tensor_parallel_size": 2}, "m.yaml:3: tp_size 2 is slime's to set: --rollout-num-gpus-per-engine is"),
        ({"load_balance_method": "x"}, "m.yaml:3: load_balance_method 'x': invalid choice: 'x' (choose from 'auto', "),
    ],
)
def test_overrides_are_checked_and_name_their_place(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        server(overrides=overrides, origin="m.yaml:3")
    version = "SGLang 0.5.23 (slime's own list, as no SGLang is installed here or named by --engine-python)"
    assert str(caught.value).startswith(message.format(version))


def test_what_the_caller_decides_wins_and_unknown_fields_are_left_out_once(caplog: pytest.LogCaptureFixture) -> None:
    arguments._say_left_out.cache_clear()
    forced = {"disaggregation_mode": "decode", "prefill_round_robin_balance": True, "base_gpu_id": 3}
    with caplog.at_level(logging.INFO):
        fields = [server(forced=forced) for _ in range(2)]
    assert fields[0] == fields[1]
    assert (fields[0]["disaggregation_mode"], fields[0]["base_gpu_id"]) == ("decode", 3)
    assert "prefill_round_robin_balance" not in fields[0]
    (line,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert line.endswith("does not have it: prefill_round_robin_balance")


def test_offload_and_routing_replay() -> None:
    args = settings()
    args.offload_rollout = args.use_rollout_routing_replay = True
    fields = server_arguments(args, device="cuda", gpus=1)
    assert (
        fields
        | {
            "enable_memory_saver": True,
            "enable_draft_weights_cpu_backup": True,
            "cuda_graph_backend_prefill": "disabled",
            "enable_return_routed_experts": True,
        }
        == fields
    )
    args.sglang_cuda_graph_backend_prefill = "full"
    assert server_arguments(args, device="cuda", gpus=1)["cuda_graph_backend_prefill"] == "full"
    shared = server_arguments(args, device="cuda", gpus=1, forced={"enable_memory_saver": False})
    assert shared["enable_memory_saver"] is False
    assert "enable_memory_saver" not in server_arguments(args, device="cpu", gpus=1), "there is no such thing on CPU"


# -- command lines ---------------------------------------------------------------------------------------


def test_the_spelling_of_each_kind() -> None:
    fields = {
        "model_path": "/m",
        "tp_size": 2,
        "enable_metrics": True,
        "log_requests": False,
        "dllm_fdfo": False,
        "lora_strict_loading": True,
        "cuda_graph_bs_decode": [1, 2],
        "allowed_media_domains": [],
        "preferred_sampling_params": {"top_p": 0.5},
        "forward_hooks": [{"name": "a b"}],
        "json_model_override_args": '{"a": 1}',
        "lora_paths": ["a=/x", {"lora_name": "b", "lora_path": "/y"}],
        "model_checksum": "",
        "crash_dump_folder": "-odd",
        "chunked_prefill_size": -1,
        "schedule_conservativeness": 1e-05,
        "chat_template": None,
    }
    assert to_argv(fields) == [
        *("--model-path", "/m", "--tp-size", "2", "--enable-metrics", "--no-dllm-fdfo", "--lora-strict-loading"),
        *("--cuda-graph-bs-decode", "1", "2", "--preferred-sampling-params", '{"top_p":0.5}'),
        *("--forward-hooks", '[{"name":"a b"}]', "--json-model-override-args", '{"a": 1}'),
        *("--lora-paths", "a=/x", '{"lora_name":"b","lora_path":"/y"}', "--model-checksum"),
        *("--crash-dump-folder=-odd", "--chunked-prefill-size=-1", "--schedule-conservativeness", "1e-05"),
    ]


def test_what_cannot_be_said_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^m.yaml:3: enable_lora: false cannot be said on its command line,"):
        server(overrides={"enable_lora": False}, origin="m.yaml:3")
    with pytest.raises(ConfigError, match=r"^--sglang-enable-lora: false cannot be said on its command line,"):
        server_arguments(settings(env={"SLIME_SGLANG_ENABLE_LORA": "false"}), device="cuda", gpus=1)
    with pytest.raises(ConfigError, match=r"^--enable-lora: false cannot be said on its command line, only true;"):
        to_argv({"enable_lora": False})


# -- router ----------------------------------------------------------------------------------------------


def test_the_router_has_slimes_defaults() -> None:
    assert router_arguments(settings()) == {
        "log_level": "warn",
        "balance_abs_threshold": 10,
        "balance_rel_threshold": 1.2,
        "request_timeout_secs": 14400,
    }
    argv = "--router-policy round_robin --router-log-level info --sglang-router-request-timeout-secs 60"
    fields = router_arguments(settings(*argv.split(), "--router-selector", "a=1", "b=2"))
    assert fields | {"policy": "round_robin", "log_level": "info", "request_timeout_secs": 60} == fields
    assert to_argv(fields | {"host": "::1", "port": 3000, "worker_urls": []}, owner=ROUTER) == [
        *("--log-level", "info", "--balance-abs-threshold", "10", "--balance-rel-threshold", "1.2"),
        *("--policy", "round_robin", "--selector", "a=1", "b=2", "--request-timeout-secs", "60"),
        *("--host", "::1", "--port", "3000", "--worker-urls"),
    ]
