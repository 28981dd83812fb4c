"""`slime.agent`: adapters before an engine, turns that a user recorded, and what the model's text says."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from slime.agent.adapters import AnthropicAdapter, BaseAdapter, OpenAIAdapter, ResponsesAdapter
from slime.agent.adapters.common import flatten_content
from slime.agent.aiohttp_threaded import AppHandle, FilteredAccessLogger, run_app_in_thread
from slime.agent.harness import CLAUDE_CODE, CODEX, BaseHarness, HarnessContext
from slime.agent.parsing import parse_model_output, parse_xml_tool_uses
from slime.agent.sandbox import (
    EXIT_TIME_BUDGET_EXCEEDED,
    E2BSandbox,
    LocalSandbox,
    SandboxError,
    ensure_agent_user,
    exec_and_wait,
)
from slime.agent.trajectory import TrajectoryManager, TurnRecord
from slime.utils.types import Sample
from slime_sandbox_local import SandboxLimits

from slime_core.errors import ConfigError

ASK: Any = [{"role": "user", "content": "7?"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"q": {"type": "string"}}}}}]


def listening(adapter: BaseAdapter) -> AppHandle:
    return run_app_in_thread(adapter.app, thread_name="t", runner_kwargs={"access_log_class": FilteredAccessLogger})


@pytest.fixture
def served(engine: Any, tokenizer: Any) -> Iterator[tuple[OpenAIAdapter, AppHandle]]:
    adapter = OpenAIAdapter(tokenizer=tokenizer, sglang_url=engine.url + "/", reasoning_parser="qwen3")
    handle = listening(adapter)
    yield adapter, handle
    handle.stop()


async def test_a_conversation_of_two_turns_is_one_sample(served: tuple[OpenAIAdapter, AppHandle], engine: Any) -> None:
    adapter, handle = served
    adapter.open_session("sid", sampling_defaults={"max_new_tokens": 3, "temperature": 1.0}, max_context_tokens=500)
    with pytest.raises(ValueError, match="open already"):
        adapter.open_session("sid")
    async with openai.AsyncOpenAI(base_url=f"{handle.url}/v1", api_key="sid") as client:
        first = await client.chat.completions.create(model="any", messages=ASK)
        said: Any = {"role": "assistant", "content": first.choices[0].message.content}
        second = await client.chat.completions.create(model="any", messages=[*ASK, said, *ASK], max_tokens=2)
    assert (said["content"], second.choices[0].message.content) == ("777", "77")
    asked = engine.bodies("/generate")
    assert [body["sampling_params"]["max_new_tokens"] for body in asked] == [3, 2]
    held = asked[0]["input_ids"] + [engine.token] * 3
    assert asked[1]["input_ids"][: len(held)] == held
    base = Sample(index=5, group_index=1, prompt="task", metadata={"row": 1})
    (sample,) = await adapter.finish_session("sid", base_sample=base, reward=0.5, extra_metadata={"solved": True})
    assert sample.tokens == asked[1]["input_ids"] + [engine.token] * 2
    assert (sample.reward, sample.rollout_id, sample.index, sample.prompt) == (0.5, 5, 5, "task")
    assert sample.loss_mask[:3] == sample.loss_mask[-2:][:1] * 3 == [1, 1, 1]
    assert sum(sample.loss_mask) == 5
    assert {p for p, m in zip(sample.rollout_log_probs, sample.loss_mask) if m} == {-0.25}
    noted = {key: sample.metadata[key] for key in ("row", "solved", "truncated", "use_tool", "ill_formed")}
    assert noted == {"row": 1, "solved": True, "truncated": False, "use_tool": False, "ill_formed": False}
    assert await adapter.finish_session("sid", base_sample=base) == []
    assert await adapter.finish_session("sid") == []


def test_from_other_threads_and_loops_and_when_nothing_was_said(
    served: tuple[OpenAIAdapter, AppHandle], engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    adapter, handle = served
    adapter.open_session("empty")
    assert asyncio.run(adapter.finish_session("empty", base_sample=Sample(index=0))) == []
    assert "session empty: " in caplog.text
    assert "it asked for none" in caplog.text
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{handle.url}/v1", api_key="empty").chat.completions.create(model="m", messages=ASK)
    adapter.open_session("dropped")
    engine.refusals = [400]
    client = openai.OpenAI(base_url=f"{handle.url}/v1", api_key="dropped", max_retries=0)
    with pytest.raises(openai.InternalServerError, match=r"502.*not now"):
        client.chat.completions.create(model="m", messages=ASK)
    asyncio.run(adapter.drop_session("dropped"))
    assert not adapter.server.sessions


def test_claudes_api_turn_caps_and_requests_that_are_running_when_the_session_ends(engine: Any, tokenizer: Any) -> None:
    adapter = AnthropicAdapter(tokenizer=tokenizer, sglang_url=engine.url, max_turns_per_sid=1)
    handle = listening(adapter)
    try:
        adapter.open_session("a", sampling_defaults={"max_new_tokens": 2})
        client = anthropic.Anthropic(base_url=handle.url, api_key="a", max_retries=0)
        message = client.messages.create(model="m", max_tokens=9, messages=ASK)
        assert message.content[0].text == "77"  # type: ignore[union-attr]
        with pytest.raises(anthropic.RateLimitError, match="max_turns"):
            client.messages.create(model="m", max_tokens=9, messages=ASK)
        (sample,) = asyncio.run(adapter.finish_session("a"))
        assert (sample.reward, sample.response, sample.session_id) == (0.0, "77", "a")
        engine.hold = True
        adapter.open_session("b")
        body = json.dumps({"model": "m", "max_tokens": 9, "messages": ASK}).encode()
        request = urllib.request.Request(
            f"{handle.url}/v1/messages", body, {"X-Api-Key": "b", "Content-Type": "application/json"}
        )

        async def ended_while_running() -> list[Sample]:
            running = asyncio.create_task(asyncio.to_thread(urllib.request.urlopen, request))
            await asyncio.to_thread(engine.arrived.acquire)
            await asyncio.to_thread(engine.arrived.acquire)
            samples = await adapter.finish_session("b", base_sample=Sample(index=0), wait_timeout=0.05)
            with pytest.raises((urllib.error.URLError, ConnectionError)):
                await running
            return samples

        assert asyncio.run(ended_while_running()) == []
    finally:
        engine.released.set()
        handle.stop()
        handle.stop()


def test_parsers_that_are_not_there(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="reasoning_parser 'gpt-oss': only <think> tags are read"):
        ResponsesAdapter(tokenizer=tokenizer, sglang_url="http://x", reasoning_parser="gpt-oss")
    with pytest.raises(Exception, match="no_such"):
        OpenAIAdapter(tokenizer=tokenizer, sglang_url="http://x", tool_parser="no_such")


@pytest.mark.parametrize(
    ("text", "parser", "expected"),
    [
        ('<tool_call>{"name": "look", "arguments": {"q": "a"}}</tool_call>', "qwen25", {"q": "a"}),
        ('<tool_call>{"name": "look", "arguments": {"q": "a"}}</tool_call>', None, {"q": "a"}),
        ("<tool_call><function=look><parameter=q>a</parameter></function></tool_call>", None, {"q": "a"}),
    ],
)
def test_parsing(text: str, parser: str | None, expected: dict[str, str]) -> None:
    found = parse_model_output(
        f"<think>plan</think>so {text}", tools_schema=TOOLS, tool_parser_name=parser, reasoning_parser_name="qwen3"
    )
    assert (found.reasoning, found.text, found.ill_formed) == ("plan", "so", False)
    assert found.tool_uses == [{"name": "look", "input": expected}]
    assert parse_model_output(text).tool_uses == []
    assert parse_model_output("<tool_call>{no", tools_schema=TOOLS).ill_formed


def test_xml_calls() -> None:
    text = "x <tool_call><function=look><parameter=q>a b</parameter></function></tool_call>"
    assert parse_xml_tool_uses(text, TOOLS) == ("x ", [{"name": "look", "input": {"q": "a b"}}])
    other = text.replace("look", "unknown")
    assert parse_xml_tool_uses(other, TOOLS) == (other, [])


# -- turns that a user recorded ---------------------------------------------------------------------------


def turn(prompt: list[int], output: list[int], finish: str = "stop") -> TurnRecord:
    return TurnRecord(prompt, output, finish, [-0.5] * len(output))


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def record(manager: TrajectoryManager, messages: list[dict[str, Any]], made: TurnRecord, answer: str) -> None:
    manager.record_turn("s", turn=made, prompt_messages=messages, response_message=say("assistant", answer))


def test_turns_that_go_on_are_one_sample_and_branches_train_each_answer_once() -> None:
    manager = TrajectoryManager()
    user, answer = say("user", "q"), say("assistant", "a")
    record(manager, [user], turn([1, 2], [3, 4]), "a")
    record(manager, [user, answer, say("user", "r")], turn([1, 2, 3, 4, 5], [6]), "b")
    record(manager, [user, answer, say("user", "z")], turn([1, 2, 3, 4, 7], [8], "length"), "c")
    assert (manager.has_session("s"), manager.turn_count("s")) == (True, 3)
    base = Sample(index=9, rollout_id=4)
    one, two = manager.get_trajectory("s", base_sample=base, reward=1.0, extra_metadata={"k": 1})
    assert (one.tokens, one.loss_mask) == ([1, 2, 3, 4, 5, 6], [1, 1, 0, 1])
    assert (two.tokens, two.loss_mask) == ([1, 2, 3, 4, 7, 8], [1])
    assert (one.rollout_id, two.reward, two.metadata["truncated"], two.status.value) == (4, 1.0, True, "truncated")
    assert manager.get_trajectory("s", base_sample=base) == []


def test_long_samples_are_cut_and_turns_without_log_probs_refused() -> None:
    manager = TrajectoryManager(fork_threshold_tokens=2)
    record(manager, [say("user", "q")], turn([1, 2], [3, 4, 5]), "a")
    (sample,) = manager.get_trajectory("s", base_sample=Sample(index=0), max_sample_tokens=4)
    sample.validate()
    assert (sample.tokens, sample.loss_mask, sample.metadata["truncated"]) == ([1, 2, 3, 4], [1, 1], True)
    with pytest.raises(ValueError, match="2 output_ids and 0 output_log_probs"):
        record(manager, [say("user", "q")], TurnRecord([1], [2, 3], "stop"), "a")
    manager.record_turn("s", turn=turn([1], [2]), prompt_messages=[], response_message=None)
    manager.drop_session("s")
    assert not manager.has_session("s")


# -- programs in a sandbox --------------------------------------------------------------------------------

PROGRAM = """\
import json, os, sys, urllib.request
claude = "ANTHROPIC_BASE_URL" in os.environ
base = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages" if claude else os.environ["OPENAI_BASE_URL"] + "/responses"
key = os.environ["ANTHROPIC_AUTH_TOKEN" if claude else "OPENAI_API_KEY"]
prompt = sys.argv[sys.argv.index("-p") + 1] if claude else sys.argv[-1]
asked = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 9} if claude else {"input": prompt}
config = open(os.path.expanduser("~/.claude.json" if claude else "~/.codex/config.toml")).read()
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
request = urllib.request.Request(base, json.dumps({"model": "m", **asked}).encode(), headers)
answer = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).read().decode()
open("answer", "w").write(answer)
sys.exit(0 if ("Accepted" in config if claude else "responses" in config) and "77" in answer else 3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("harness", "program"), [(CLAUDE_CODE, "claude"), (CODEX, "codex")])
async def test_a_program_in_a_sandbox_talks_to_the_adapter(
    harness: BaseHarness, program: str, served: tuple[OpenAIAdapter, AppHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, handle = served
    adapter.open_session("sid", sampling_defaults={"max_new_tokens": 2})
    inside = {8790: ("127.0.0.1", handle.port)}
    async with LocalSandbox(SandboxLimits(endpoints=inside), isolation="best-effort") as sandbox:
        with pytest.raises(SandboxError, match=f"no program {program!r} in the sandbox"):
            await harness.install_cli(sandbox)
        where = f"{sandbox.work}/repo"
        await ensure_agent_user(sandbox, where)
        await sandbox.write_file(f"{sandbox.work}/bin/{program}.py", PROGRAM)
        start = f'#!/bin/sh\nexec python3 "$(dirname "$0")/{program}.py" "$@"\n'
        await sandbox.write_file(f"{sandbox.work}/bin/{program}", start)
        await sandbox.exec(f"chmod +x {sandbox.work}/bin/{program}", timeout=10, check=True)
        path = {"PATH": f"{sandbox.work}/bin:/usr/local/bin:/usr/bin:/bin"}
        monkeypatch.setenv(harness.extra_envs_env, json.dumps(path))
        code = await harness.run(
            sandbox, workdir=where, session_id="sid", adapter_url="http://127.0.0.1:8790", time_budget_sec=60,
            prompt="it's 7?",
        )  # fmt: skip
        assert code == 0
        assert b"77" in await sandbox.read_file(f"{where}/answer")
        late = await exec_and_wait(sandbox, "sleep 9", time_budget_sec=0.2)
        assert late == EXIT_TIME_BUDGET_EXCEEDED
    (sample,) = await adapter.finish_session("sid", base_sample=Sample(index=0))
    assert sample.response == "77"


def test_the_text_of_blocks() -> None:
    result = {"type": "tool_result", "content": [{"type": "text", "text": "out"}, {"type": "image"}]}
    blocks = ["a", {"type": "text", "text": "b"}, {"type": "x", "content": "c"}, result, {"text": None}, 7]
    assert flatten_content(blocks) == "a\nb\nc\nout\n[image omitted]\n7"
    assert [flatten_content(value) for value in (None, "t", {"k": 1})] == ["", "t", "{'k': 1}"]


async def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"no E2BSandbox; set SLIME_E2B_SANDBOX=file\.py:Class"):
        E2BSandbox("image")
    (tmp_path / "stand_in.py").write_text("class Boxes(list):\n    pass\n")
    monkeypatch.setenv("SLIME_E2B_SANDBOX", f"{tmp_path / 'stand_in.py'}:Boxes")
    assert list(E2BSandbox("image")) == list("image")  # type: ignore[call-overload]
    monkeypatch.setenv(CODEX.extra_envs_env, "[1]")
    with pytest.raises(ConfigError, match="SLIME_AGENT_CODEX_EXTRA_ENVS is list; type"):
        await CODEX.launch_and_wait(LocalSandbox(), HarnessContext("/w", "s", "http://x"), "p", 1)
