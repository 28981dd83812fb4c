"""`slime mcp`, called by the MCP project's own client: over the command's standard input and output, and in process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters, stdio_client
from slime_runs.mcp_server import make_server

from tests.made_run import MadeRun

TOOLS = {"runs", "show", "why", "samples", "compare", "check", "docs"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of two seeds, of which one has written instructions to its reader."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        MadeRun(root / f"seed{seed}", seed=seed, texts=["x" * 5000]).write()
    (root / "seed0/incidents.jsonl").write_text(
        json.dumps({"rollout_id": 2, "check": "reward_spread", "cause": "all rewards are equal", "numbers": "0 of 16"})
    )
    return root


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[Client]:
    async with Client(make_server(folder)) as client:
        yield client


async def call(folder: Path, tool: str, **arguments: Any) -> Any:
    """Return the tool's data."""
    async with connected(folder) as client:
        answer = await client.call_tool(tool, arguments)
    assert not answer.is_error, answer.content
    return answer.structured_content.get("result", answer.structured_content)


@pytest.mark.slow
async def test_the_command_serves_the_tools(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "slime_core", "mcp", str(folder)], env=dict(os.environ)
    )
    async with Client(stdio_client(command)) as client:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == TOOLS
        assert all(tool.annotations and tool.annotations.read_only_hint and tool.description for tool in tools)
        listed = (await client.call_tool("runs", {})).structured_content["result"]
        assert {run["run"]: run["rollouts"] for run in listed} == {"seed0": 4, "seed1": 4}
        assert not (await client.call_tool("show", {"run": "seed0"})).is_error
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


async def test_show_and_why(folder: Path) -> None:
    shown = await call(folder, "show", run="seed0")
    assert shown["rollouts"] == {"done": 4, "of": 4}
    assert [step for step, _ in shown["curves"]["reward"]] == [0, 1, 2, 3, 4]
    found = await call(folder, "why", run="seed0")
    assert (found["alive"], found["wrong"]) == (False, True)
    assert any("all rewards are equal" in line for line in found["learning"])
    assert not any("all rewards are equal" in line for line in (await call(folder, "why", run="seed1"))["learning"])


async def test_samples_are_chosen_and_cut(folder: Path) -> None:
    found = await call(folder, "samples", run="seed0", rollout=2, order="best", count=3, characters=100)
    scores = [sample["score"] for sample in found["samples"]]
    assert {sample["rollout"] for sample in found["samples"]} == {2}
    assert scores == sorted(scores, reverse=True)
    assert found["samples"][0]["messages"][0]["role"] == "user"
    assert found["samples"][0]["advantage"] is not None
    assert all(len(sample["response"]) < 150 for sample in found["samples"])
    evaluated = await call(folder, "samples", run="seed0", data_set="held", count=100)
    assert {sample["fate"] for sample in evaluated["samples"]} == {"evaluated"}
    nothing = await call(folder, "samples", run="seed0", text="no such text")
    assert nothing["samples"] == []
    assert "rollouts 1 to 4" in nothing["there are"]


async def test_compare(folder: Path) -> None:
    found = await call(folder, "compare", runs=["seed0", "seed1"], last=2)
    assert len(found["groups"]) == 1  # they differ in --seed alone
    assert (found["from"], found["until"]) == (3, 4)


RUN_FILE = "hf_checkpoint: no/model\nprompt_data: no.jsonl\nrollout_batch_size: 4\nnum_rollout: 1\nrm_type: exact\n"


async def test_check_accepts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{RUN_FILE}rollout_max_response_len: 8\n")
    found = await call(folder, "check", flags=["--config", str(tmp_path / "run.yaml"), "--lr", "1e-5"])
    assert found["problem"] is None
    assert found["settings"]["lr"] == {"value": 1e-5, "origin": "flag"}
    assert found["settings"]["rm_type"]["origin"].endswith("run.yaml:5")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--advantage-estimator", "gsp"], "gspo"),
        (["--rollout-batchsize", "8"], "--rollout-batch-size"),
        (["--lr", "fast"], "fast"),
    ],
)
async def test_check_refuses(folder: Path, flags: list[str], problem: str) -> None:
    assert problem in (await call(folder, "check", flags=flags))["problem"]


@pytest.mark.parametrize(
    ("query", "page", "heading"),
    [
        ("write a reward function", "how-to/write-a-reward.md", ""),
        ("resume a killed run", "", "esume"),
        ("--eps-clip-high", "flags", "--eps-clip-high"),
        ('what does "AND (dlogp" mean *', "quickstart.md", ""),
    ],
)
async def test_docs_are_found(folder: Path, query: str, page: str, heading: str) -> None:
    found = await call(folder, "docs", query=query, count=8)
    assert any(section["page"].startswith(page) and heading in section["heading"] for section in found)
    assert all(section["text"] for section in found)


async def test_docs_without_words(folder: Path) -> None:
    assert await call(folder, "docs", query="?!") == []


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("show", {"run": "../.."}, "outside of"),
        ("show", {"run": "/etc"}, "outside of"),
        ("show", {"run": "absent"}, "no such directory"),
        ("samples", {"run": "seed0", "rollout": 0}, "rollouts count from 1"),
        ("compare", {"runs": ["seed0"]}, "name two or more"),
    ],
)
async def test_a_wrong_call_is_an_error_with_its_reason(folder: Path, tool: str, arguments: Any, said: str) -> None:
    async with connected(folder) as client:
        answer = await client.call_tool(tool, arguments)
    assert answer.is_error
    assert said in answer.content[0].text


def test_the_missing_extra_is_named(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "slime_runs.mcp_server", raising=False)
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    assert "pip install 'slime-rl[mcp]'" in refused("mcp", "outputs")
