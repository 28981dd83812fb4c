"""`slime engines plan`: the plan of a cluster that is not there, and what the seams around it say."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
from slime_engine_sglang import plan_command as engines

from tests.conftest import Slime

MODEL = ("--rollout-engine", "sglang", "--hf-checkpoint", "/nowhere")


def plan(*argv: object) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert engines.run(["plan", *map(str, argv)]) == 0
    return out.getvalue()


def test_a_table_of_two_nodes() -> None:
    text = plan(*MODEL, "--colocate", "--rollout-num-gpus", 16, "--rollout-num-gpus-per-engine", 16, "--num-gpus", 16)
    assert text.startswith("2 servers on cuda, 2 nodes\n\nmodel default: /nowhere (receives the trainer's weights)\n")
    assert "default/0@1  regular  1     0-7   node_rank=1 dist_init_addr=(at launch)" in text
    assert "tp_size=16" in text
    assert "nnodes=2" in text


def test_json() -> None:
    found = json.loads(plan(*MODEL, "--num-gpus", 0, "--rollout-num-gpus", 2, "--sglang-log-level", "error", "--json"))
    assert found["device"] == "cpu"
    servers = found["models"][0]["servers"]
    assert [s["name"] for s in servers] == ["default/0", "default/1"]
    assert {s["arguments"]["log_level"] for s in servers} == {"error"}
    assert [s["arguments"]["random_seed"] for s in servers] == [
        servers[0]["arguments"]["random_seed"] + rank for rank in range(2)
    ]


def test_processes_of_one_cpu_engine_are_bound_to_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    (server,) = json.loads(plan(*MODEL, "--num-gpus", 0, "--rollout-num-gpus-per-engine", 2, "--json"))["models"][0][
        "servers"
    ]
    assert server["arguments"]["tp_size"] == 2
    assert len(server["environment"]["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2


def test_an_engine_without_servers_has_no_plan(slime: Slime) -> None:
    done = slime("engines", "plan", "--hf-checkpoint", "/m", check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "slime: error: --rollout-engine 'embedded' (default) starts no servers, so there is no plan; type"
        " --rollout-engine sglang\n"
    )
