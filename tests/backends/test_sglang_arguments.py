"""The installed SGLang's own parsers, against the list of their flags and the command lines made from it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slime_engine_sglang.arguments import router_arguments, server_arguments, to_argv
from slime_engine_sglang.environment import installed_versions, server_environment
from slime_engine_sglang.flag_list import ROUTER, cache_file, installed_flags, shipped_flags, size

from slime_core.config import load_settings
from slime_core.config.flag_parser import as_json, takes_list
from tests.scripts import load_script

pytestmark = [pytest.mark.backends, pytest.mark.timeout(900)]

PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
from sglang_router.launch_router import parse_router_args
server, router = json.load(sys.stdin)
found = []
if server is not None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found.append(vars(parser.parse_args(server)))
if router is not None:
    found.append(vars(parse_router_args(router)))
print("\\n" + json.dumps(found))
"""

Parse = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def parse(sglang_python: Path) -> Parse:
    """What SGLang's server and router make of two command lines, in one process of their environment."""

    def call(server: list[str] | None, router: list[str] | None = None) -> list[dict[str, Any]]:
        done = subprocess.run(
            [str(sglang_python), "-c", PARSE],
            input=json.dumps([server, router]),
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, **server_environment("cpu", python=sglang_python)},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
        return found

    return call


def example(flag: argparse.Action) -> Any:
    """A value that is not the flag's default, where there is another."""
    special = {
        "cuda_graph_config": {"decode": {"max_bs": 4}},
        "lora_paths": ["a=/x", '{"lora_name":"b","lora_path":"/"}'],
    }
    name = flag.dest.removeprefix("sglang_").removeprefix("router_")
    if name in special:
        return special[name]
    if flag.nargs == 0:
        return not flag.default
    values: dict[Any, Any] = {int: -3, size: 4096, float: 0.125, as_json: {"a": [1]}, None: "a b"}
    one = next((c for c in flag.choices if c != flag.default), flag.default) if flag.choices else values[flag.type]
    return [one, one] if takes_list(flag) else one


def test_the_shipped_lists_are_those_of_the_version_they_name(sglang_python: Path) -> None:
    if installed_versions(sglang_python) != shipped_flags().versions:
        pytest.skip(f"another version is installed: {installed_versions(sglang_python)}")
    assert load_script("scripts/snapshot.py").main(["--sglang", str(sglang_python), "--check"]) == 0


def test_the_installed_list_is_cached(sglang_python: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    installed_flags.cache_clear()
    flags = installed_flags(sglang_python)
    assert flags.versions == installed_versions(sglang_python)
    assert cache_file(flags.versions).exists()
    monkeypatch.setattr("slime_engine_sglang.flag_list.introspected", None)
    installed_flags.cache_clear()
    assert installed_flags(sglang_python).server.option_strings == flags.server.option_strings


def test_every_field_survives_the_command_line(sglang_python: Path, parse: Parse) -> None:
    flags = installed_flags(sglang_python)
    server = {flag.dest.removeprefix("sglang_"): example(flag) for flag in flags.server.flags}
    router = {flag.dest.removeprefix("router_"): example(flag) for flag in flags.router.flags}
    # These have a form of their own in RouterArgs.
    special = ("prefill", "decode", "selector", "prefill_selector", "decode_selector", "control_plane_api_keys")
    router = {name: value for name, value in router.items() if name not in (*special, "jwt_role_mapping")}
    parsed, routed = parse(to_argv(server, sglang_python), to_argv(router, sglang_python, ROUTER))
    server["lora_paths"] = ["a=/x", {"lora_name": "b", "lora_path": "/"}]
    assert {name: parsed[name] for name in server} == server
    renamed = {"tls_cert_path": "server_cert_path", "tls_key_path": "server_key_path"}
    assert {name: routed[renamed.get(name, name)] for name in router} == router


def test_settings_and_disaggregation_survive_it(sglang_python: Path, parse: Parse) -> None:
    argv = (
        "--hf-checkpoint /m --rollout-engine sglang --sglang-speculative-algorithm EAGLE --sglang-no-dllm-fdfo"
        " --sglang-enable-deterministic-inference --sglang-quantization fp8 --sglang-attention-backend torch_native"
        " --sglang-cuda-graph-bs 1 2 --sglang-max-total-tokens 16Ki --router-policy round_robin --router-selector a=1"
    )
    args = load_settings([*argv.split(), "--engine-python", str(sglang_python)], command="show", env={}).args
    fields = server_arguments(args, device="cpu", gpus=2, rank=1, forced={"disaggregation_mode": "decode"})
    routing = router_arguments(args) | {"pd_disaggregation": True, "port": 3001, "prometheus_port": 3002}
    server, router = parse(to_argv(fields, sglang_python), to_argv(routing, sglang_python, ROUTER))
    assert {name: server[name] for name in fields} == fields
    assert (server["random_seed"], server["tp_size"], server["max_total_tokens"]) == (1234 + 2, 2, 16384)
    assert (server["cuda_graph_bs_decode"], server["dllm_fdfo"], server["device"]) == ([1, 2], False, "cpu")
    assert router["selector"] == {"a": "1"}
    del routing["selector"]
    assert {name: router[name] for name in routing} == routing
