from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from slime_engine_sglang import arguments
from slime_engine_sglang.arguments import server_arguments, to_argv
from slime_engine_sglang.flag_list import ROUTER, SERVER, shipped_flags
from slime_engine_sglang.owned import ROUTER_OWNED, SERVER_OWNED, refuse_owned

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


def test_overrides_lie_above_settings_and_below_slime() -> None:
    overrides = {"chunked-prefill-size": 64, "expert_parallel_size": 2, "fp8_gemm_runner_backend": "triton"}
    fields = server("--sglang-chunked-prefill-size", "8", gpus=2, overrides=overrides, origin="m.yaml:3")
    assert (fields["chunked_prefill_size"], fields["ep_size"], fields["tp_size"]) == (64, 2, 2)
    assert server("--sglang-pp-size", "2", gpus=8)["tp_size"] == 4


@pytest.mark.parametrize(
    ("argv", "overrides", "message"),
    [
        ("--sglang-pp-size 3", {}, "--sglang-pp-size 3 does not divide the engine's 4 GPUs"),
        ("--sglang-dp-size 2", {}, "--sglang-dp-size 2 needs --sglang-enable-dp-attention; .*--rollout-num-gpus"),
        ("--sglang-attn-dp-size 3", {}, "--sglang-attn-dp-size 3 does not divide the engine's tp_size 4"),
        ("--sglang-enable-dp-attention", {"dp_size": 3}, r"--sglang-dp-size 3 \(m.yaml:3\) does not divide"),
        ("", {"chunked_prefil_size": 1}, "m.yaml:3: chunked_prefil_size: SGLang .*Did you mean chunked_prefill_size?"),
        ("", {"chunked_prefill_size": "x"}, "m.yaml:3: chunked_prefill_size 'x': invalid int value: 'x'"),
        ("", {"ep": 1, "ep_size": 2}, "m.yaml:3: 'ep_size' is already set as 'ep'; remove one"),
        ("", {"tensor_parallel_size": 2}, "m.yaml:3: tp_size 2 is slime's to set: --rollout-num-gpus-per-engine is"),
        ("", {"load_balance_method": "x"}, r"m.yaml:3: load_balance_method 'x': .*\(choose from 'auto', "),
        ("", {"enable_lora": False}, "m.yaml:3: enable_lora: this flag can only be set to true"),
    ],
)
def test_what_is_refused(argv: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        server(*argv.split(), gpus=4, overrides=overrides, origin="m.yaml:3" if overrides else "")


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


# -- fields that slime sets ------------------------------------------------------------------------------


def load(*argv: str) -> list[str]:
    return load_settings([*argv, "--rollout-engine", "sglang"], command="show", env={}).warnings


def _value(attribute: str) -> list[str]:
    owner = SERVER if attribute.startswith(SERVER) else ROUTER
    flag = shipped_flags().field(owner, attribute.removeprefix(owner))
    assert flag is not None
    if flag.nargs == 0:
        return []
    return [[*flag.choices][-1] if flag.choices else "7"]


@pytest.mark.parametrize("prefix", [SERVER, ROUTER])
def test_each_is_refused_saying_what_to_set(prefix: str) -> None:
    for field, text in (SERVER_OWNED if prefix == SERVER else ROUTER_OWNED).items():
        flag = shipped_flags().field(prefix, field)
        if flag is None or field in ("config", "tp_size", "skip_server_warmup"):
            continue
        with pytest.raises(ConfigError, match=re.escape(f"(flag) is slime's to set: {text}.")) as caught:
            load(flag.option_strings[-1], *_value(prefix + field))
        assert str(caught.value).startswith("--" + flag.dest.replace("_", "-"))
    (warning,) = load("--sglang-skip-server-warmup")
    assert "without need" in warning


@pytest.mark.parametrize(
    ("argv", "gpus", "origin"),
    [
        ("--sglang-tp-size 2", 2, "derived: sglang_tp_size"),
        ("--sglang-tensor-parallel-size 2 --sglang-pp-size 2", 4, "derived: sglang_tp_size * sglang_pp_size"),
        ("--sglang-tp-size 2 --rollout-num-gpus-per-engine 2", 2, "flag"),
        ("--sglang-tp-size 2 --rollout-num-gpus-per-engine 4 --sglang-pp-size 2", 4, "flag"),
    ],
)
def test_the_size_of_an_engine_may_be_said_in_sglangs_way(argv: str, gpus: int, origin: str) -> None:
    settings = load_settings([*argv.split(), "--rollout-engine", "sglang"], command="show", env={})
    assert settings.args.rollout_num_gpus_per_engine == gpus
    assert str(settings.origins["rollout_num_gpus_per_engine"]) == origin
    assert not [w for w in settings.warnings if "tp-size" in w]


def test_with_another_engine_they_have_no_effect() -> None:
    argv = "--sglang-tp-size 2 --sglang-port 1 --router-host h --rollout-engine embedded --train-backend embedded"
    settings = load_settings(argv.split(), command="show", env={})
    assert settings.args.rollout_num_gpus_per_engine == 1
    (warning,) = [w for w in settings.warnings if "sglang" in w]
    assert warning.startswith("without effect with --train-backend embedded and --rollout-engine embedded: ")
    assert "--sglang-tp-size 2 (flag), --sglang-port 1 (flag)" in warning


def test_overrides_of_a_group() -> None:
    refuse_owned({"trust_remote_code": True, "skip_server_warmup": True, "chunked_prefill_size": 4}, "m.yaml:3")
    with pytest.raises(ConfigError) as caught:
        refuse_owned({"nnodes": 2, "skip_server_warmup": False}, "m.yaml:3")
    assert "m.yaml:3: skip_server_warmup False is slime's to set: " in str(caught.value)
    assert "m.yaml:3: nnodes 2 is slime's to set: slime places engines" in str(caught.value)
