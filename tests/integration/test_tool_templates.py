"""Generators that speak in turns under chat templates of published families: tokens only ever grow."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from slime_sandbox_local import isolation_here
from slime_testing_contracts import Reply, ScriptedEngine

from slime_core import GenerateContext, Sample, SampleStatus, encode_prompt, resolve, run_tools
from slime_core.config import Args
from slime_core.sample.provenance import Source
from slime_core.tools import ToolCall
from tests.chat_tokenizers import FAMILIES, chat_tokenizer

TOOLS = '''
def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city} is fine"
'''
PARSERS = {"qwen2.5": "hermes", "qwen3": "hermes", "llama3": "llama3", "glm4": "glm4"}
"""Template -> how its model writes calls."""
CALLS = [ToolCall("", "weather", {"city": "Oslo"}), ToolCall("", "weather", {"city": "Rome"})]
family_of = pytest.mark.parametrize("family", PARSERS)


@pytest.fixture
def args(tmp_path: Path) -> Args:
    file = tmp_path / "mine.py"
    file.write_text(TOOLS)
    return Args(tools_path=[str(file)], tool_timeout=60.0)


def run(name: str, args: Any, engine: ScriptedEngine, sample: Sample) -> list[Sample]:
    generate = resolve("generators", name).obj
    context = GenerateContext(engine, engine.tokenizer)
    params = {"max_new_tokens": 4000, "skip_special_tokens": False}
    result = asyncio.run(generate(args, sample, params, context=context))
    return result if isinstance(result, list) else [result]


def asked(args: Any, tokenizer: Any) -> Sample:
    messages = [{"role": "user", "content": "Where is it fine?"}]
    schemas = [tool.schema for tool in run_tools(args)]
    return Sample(index=1, prompt=messages, tokens=encode_prompt(tokenizer, messages, args, schemas))


def turns(args: Any, family: str) -> tuple[Any, list[Reply]]:
    """The family's tokenizer, and a turn of calls followed by an answer."""
    args.tool_call_parser = PARSERS[family]
    tokenizer = chat_tokenizer(family)
    written = resolve("tool_parsers", PARSERS[family]).obj().render(CALLS[:1] if family == "glm4" else CALLS)
    return tokenizer, [Reply(written + tokenizer.eos_token), Reply("Both." + tokenizer.eos_token)]


@family_of
def test_what_was_sent_stays_the_prefix(args: Args, family: str) -> None:
    tokenizer, replies = turns(args, family)
    engine = ScriptedEngine(replies, tokenizer)
    (sample,) = run("tool_use", args, engine, asked(args, tokenizer))
    first, second = (request.input_ids for request in engine.requests)
    sampled = tokenizer.encode(replies[0].text, add_special_tokens=False)
    assert second[: len(first) + len(sampled)] == first + sampled
    assert sample.tokens[: len(second)] == second
    told = [m["content"] for m in sample.metadata["tool_messages"] if m["role"] == "tool"]
    assert told == ["Oslo is fine", "Rome is fine"][: len(told)]
    between = tokenizer.decode(second[len(first) + len(sampled) :])
    assert all(content in between for content in told)
    spans = sample.known_spans()
    assert {span.source for span in spans if span.source == Source.TOOL}, "the results are the tool's"
    assert sum(span.length for span in spans if span.source == Source.SAMPLED) == sum(sample.loss_mask or [])


@family_of
@pytest.mark.parametrize("cut", [0, 1])
def test_an_interrupted_sample_ends_with_the_same_tokens(args: Args, family: str, cut: int) -> None:
    tokenizer, replies = turns(args, family)
    (whole,) = run("tool_use", args, ScriptedEngine(replies, tokenizer), asked(args, tokenizer))
    text = replies[cut].text
    parts = [Reply(text[:5], "abort")]
    (stopped,) = run("tool_use", args, ScriptedEngine([*replies[:cut], *parts], tokenizer), asked(args, tokenizer))
    assert stopped.status == SampleStatus.ABORTED
    rest = [Reply(text[5:]), *replies[cut + 1 :]]
    (resumed,) = run("tool_use", args, ScriptedEngine(rest, tokenizer), Sample.from_dict(stopped.to_dict()))
    assert tokenizer.decode(resumed.tokens) == tokenizer.decode(whole.tokens)
    assert resumed.status == SampleStatus.COMPLETED
    assert resumed.metadata["tool_messages"] == whole.metadata["tool_messages"]


@family_of
def test_roles_are_told_behind_what_they_sampled(args: Args, family: str) -> None:
    tokenizer = chat_tokenizer(family)
    engine = ScriptedEngine([Reply(word + tokenizer.eos_token) for word in ("3", "no", "2")], tokenizer)
    bare = Args()
    solver, critic = run("multi_agent", bare, engine, asked(bare, tokenizer))
    first, _, last = (request.input_ids for request in engine.requests)
    sampled = tokenizer.encode("3" + tokenizer.eos_token, add_special_tokens=False)
    assert last[: len(first) + len(sampled)] == first + sampled
    assert "A critic says:\nno" in tokenizer.decode(last)
    assert "Somebody answers:\n3" in tokenizer.decode(critic.tokens)
    assert sum(solver.loss_mask or []) == 2 * len(sampled)


SPEAKS = {
    "code_sandbox": ("<code>print(6 * 7)</code>", "42", {}),
    "search": ("<search>capital of Peru</search>", "Lima is the capital of Peru.", {"corpus": "corpus.jsonl"}),
}
"""Generator -> a turn that asks for something, what comes of it, options."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SPEAKS)
@pytest.mark.parametrize(
    "ended", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["by its token", "by the stop string"]
)
def test_what_code_and_queries_bring_is_put_behind_what_was_sent(
    name: str, family: str, ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.jsonl").write_text('{"title": "Lima", "text": "Lima is the capital of Peru."}\n')
    said, brought, options = SPEAKS[name]
    if name == "code_sandbox" and not isolation_here().complete:
        pytest.skip(f"no complete isolation here: {isolation_here()}")
    bare = Args(plugins={name: {**options, "observation": None}})
    tokenizer = chat_tokenizer(family)
    end = tokenizer.eos_token
    replies = [Reply(said + end * ended, "stop"), Reply("Done." + end)]
    engine = ScriptedEngine(list(replies), tokenizer)
    (sample,) = run(name, bare, engine, asked(bare, tokenizer))
    first, second = (request.input_ids for request in engine.requests)
    sampled = tokenizer.encode(replies[0].text, add_special_tokens=False)
    assert second[: len(first) + len(sampled)] == first + sampled
    assert sample.tokens[: len(second)] == second
    between = tokenizer.decode(second[len(first) + len(sampled) :])
    assert brought in between
    assert between.startswith(end) is (not ended and family != "glm4"), "a turn that a stop string ended is closed"
    assert sum(sample.loss_mask or []) == len(sampled) + len(tokenizer.encode("Done." + end, add_special_tokens=False))
    assert sample.status == SampleStatus.COMPLETED
    spans = sample.known_spans()
    assert sum(span.length for span in spans if span.source == Source.SAMPLED) == sum(sample.loss_mask or [])
    (stopped,) = run(name, bare, ScriptedEngine([replies[0], Reply("Do", "abort")], tokenizer), asked(bare, tokenizer))
    assert stopped.status == SampleStatus.ABORTED
    (resumed,) = run(name, bare, ScriptedEngine([Reply("ne." + end)], tokenizer), Sample.from_dict(stopped.to_dict()))
    assert tokenizer.decode(resumed.tokens) == tokenizer.decode(sample.tokens)
