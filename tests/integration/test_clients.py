"""Unmodified clients against the front, a test per cell of the table in docs/engines/clients.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.agent_toys import call_text
from tests.front_servers import in_thread, tiny, toy
from tests.tiny_models import byte_tokenizer, make_model, make_text_model, one_thread

__all__ = ["byte_tokenizer", "make_model", "make_text_model", "one_thread"]
SAY: Any = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]
SCHEMA: dict[str, Any] = {
    "title": "verdict", "description": "A verdict.", "type": "object",
    "properties": {"sure": {"type": "boolean"}}, "required": ["sure"], "additionalProperties": False,
}  # fmt: skip
FORM: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA, "strict": True}}
GREEDY: Any = {"extra_body": {"temperature": 0}}
"""The newest of Anthropic's clients has no argument for it."""
TABLE = Path(__file__).parents[2] / "docs" / "engines" / "clients.md"


@pytest.fixture(scope="module")
def url(make_text_model: Callable[..., tuple[Path, Any]]) -> Iterator[str]:
    with in_thread(partial(tiny, make_text_model("qwen3", seed=1)[0])) as found:
        yield found


@pytest.fixture
def calling() -> Iterator[str]:
    """Where a model answers with a call, and then with a sentence."""
    with in_thread(lambda: toy(["One moment. " + call_text("add", a=7), "Seven."])) as found:
        yield found


class OpenAI:
    def __init__(self, url: str) -> None:
        openai = pytest.importorskip("openai")
        self.api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(self, **more: Any) -> Any:
        return self.api.chat.completions.create(**{"model": "m", "messages": SAY, "max_tokens": 8, **more})

    def chat(self) -> None:
        answer = self.ask(temperature=0)
        assert answer.choices[0].message.content
        assert answer.usage.completion_tokens == 8
        old = self.api.completions.create(model="m", prompt="hi", max_tokens=8, temperature=0)
        assert old.choices[0].text
        new = self.api.responses.create(model="m", input="hi", max_output_tokens=8, temperature=0)
        assert new.output_text == answer.choices[0].message.content
        more = self.api.responses.create(model="m", input="so", max_output_tokens=8, previous_response_id=new.id)
        assert more.usage.input_tokens > new.usage.input_tokens
        assert self.api.models.retrieve("m").id == "m"
        assert self.api.models.list().data[0].id == "tiny"

    def stream(self) -> None:
        whole = self.ask(seed=3).choices[0].message.content
        chunks = list(self.ask(seed=3, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole
        assert chunks[-1].usage.completion_tokens == 8
        with self.api.responses.stream(model="m", input="hi", max_output_tokens=4) as events:
            assert [event.type for event in events][-1] == "response.incomplete"

    def tools(self) -> None:
        first = self.ask(tools=TOOLS, tool_choice="auto", parallel_tool_calls=False, max_tokens=200).choices[0]
        (call,) = first.message.tool_calls
        assert (first.finish_reason, call.function.name, json.loads(call.function.arguments)) == (
            "tool_calls", "add", {"a": 7},
        )  # fmt: skip
        told = {"role": "tool", "tool_call_id": call.id, "content": "7"}
        history = [*SAY, first.message.model_dump(exclude_none=True), told]
        assert self.ask(messages=history, tools=TOOLS, max_tokens=200).choices[0].message.content == "Seven."

    def logprobs(self) -> None:
        (choice,) = self.ask(logprobs=True, top_logprobs=2).choices
        assert len(choice.logprobs.content) == 8
        assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)

    def n(self) -> None:
        answer = self.ask(n=3, seed=1)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert len({choice.message.content for choice in answer.choices}) == 3
        assert answer.usage.completion_tokens == 24

    def stop(self) -> None:
        assert_stops(lambda **more: self.ask(**more).choices[0].message.content)

    def seed(self) -> None:
        assert len({self.ask(seed=5).choices[0].message.content for _ in range(3)}) == 1

    def structured(self) -> None:
        answer = self.ask(response_format=FORM, max_tokens=40).choices[0].message.content
        assert json.loads(answer).keys() == {"sure"}
        form = {"type": "json_schema", "name": "verdict", "schema": SCHEMA}
        made = self.api.responses.create(model="m", input="hi", max_output_tokens=40, text={"format": form})
        assert json.loads(made.output_text).keys() == {"sure"}


class Anthropic:
    def __init__(self, url: str) -> None:
        anthropic = pytest.importorskip("anthropic")
        self.api = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)

    def ask(self, **more: Any) -> Any:
        return self.api.messages.create(**{"model": "m", "messages": SAY, "max_tokens": 8, **GREEDY, **more})

    def chat(self) -> None:
        answer = self.ask()
        assert answer.content[0].text
        assert (answer.usage.output_tokens, answer.stop_reason) == (8, "max_tokens")
        assert self.api.messages.count_tokens(model="m", messages=SAY).input_tokens == answer.usage.input_tokens
        assert self.api.models.retrieve("m").id == "m"

    def stream(self) -> None:
        whole = self.ask().content[0].text
        with self.api.messages.stream(model="m", messages=SAY, max_tokens=8, **GREEDY) as events:
            assert "".join(events.text_stream) == whole

    def tools(self) -> None:
        tools = [{"name": "add", "description": "Adds.", "input_schema": PARAMETERS}]
        first = self.ask(tools=tools, max_tokens=200)
        assert first.stop_reason == "tool_use"
        call = first.content[-1]
        assert (call.name, call.input) == ("add", {"a": 7})
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "7"}]}
        history = [*SAY, {"role": "assistant", "content": [b.model_dump() for b in first.content]}, result]
        assert self.ask(messages=history, tools=tools, max_tokens=200).content[0].text == "Seven."

    def stop(self) -> None:
        free = self.ask(max_tokens=60).content[0].text
        stop = stop_in(free)
        answer = self.ask(max_tokens=60, stop_sequences=[stop])
        assert answer.content[0].text == free[: free.index(stop)]
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


class LiteLLM(OpenAI):
    def __init__(self, url: str) -> None:
        self.url = url
        self.litellm = pytest.importorskip("litellm", exc_type=ImportError)

    def ask(self, **more: Any) -> Any:
        where = {"model": "openai/m", "api_base": f"{self.url}/v1", "api_key": "none", "num_retries": 0}
        return self.litellm.completion(**{**where, "messages": SAY, "max_tokens": 8, **more})

    def chat(self) -> None:
        answer = self.ask(temperature=0)
        assert answer.choices[0].message.content
        assert answer.usage.completion_tokens == 8
        other = self.litellm.completion(
            model="anthropic/m", api_base=self.url, api_key="none", messages=SAY, max_tokens=8, temperature=0
        )
        assert other.choices[0].message.content == answer.choices[0].message.content

    def stream(self) -> None:
        whole = self.ask(seed=3).choices[0].message.content
        chunks = list(self.ask(seed=3, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole

    def structured(self) -> None:
        answer = self.ask(response_format=FORM, max_tokens=40).choices[0].message.content
        assert json.loads(answer).keys() == {"sure"}


class LangChain:
    def __init__(self, url: str) -> None:
        self.url = url
        self.openai = pytest.importorskip("langchain_openai")

    def model(self, **more: Any) -> Any:
        where = {"model": "m", "base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0}
        return self.openai.ChatOpenAI(**{**where, "max_tokens": 8, **more})

    def chat(self) -> None:
        answer = self.model(temperature=0).invoke("hi")
        assert answer.content
        assert answer.usage_metadata["output_tokens"] == 8

    def stream(self) -> None:
        whole = self.model(seed=3).invoke("hi").content
        assert "".join(chunk.content for chunk in self.model(seed=3).stream("hi")) == whole

    def tools(self) -> None:
        from langchain_core.messages import HumanMessage, ToolMessage

        model = self.model(max_tokens=200).bind_tools(TOOLS, parallel_tool_calls=False)
        first = model.invoke("hi")
        (call,) = first.tool_calls
        assert (call["name"], call["args"]) == ("add", {"a": 7})
        told = ToolMessage("7", tool_call_id=call["id"])
        assert model.invoke([HumanMessage("hi"), first, told]).content == "Seven."

    def logprobs(self) -> None:
        answer = self.model(logprobs=True, top_logprobs=2).invoke("hi")
        assert len(answer.response_metadata["logprobs"]["content"]) == 8

    def n(self) -> None:
        from langchain_core.messages import HumanMessage

        made = self.model(n=3, seed=1).generate([[HumanMessage("hi")]]).generations[0]
        assert len({one.text for one in made}) == 3

    def stop(self) -> None:
        assert_stops(lambda **more: self.model(**{"max_tokens": 8, **more}).invoke("hi").content)

    def seed(self) -> None:
        assert len({self.model(seed=5).invoke("hi").content for _ in range(3)}) == 1

    def structured(self) -> None:
        model = self.model(max_tokens=40).with_structured_output(SCHEMA, method="json_schema")
        assert model.invoke("hi").keys() == {"sure"}


def stop_in(text: str) -> str:
    """A piece of it."""
    return next(text[i : i + 2] for i in range(5, len(text) - 2) if text[i : i + 2].isascii())


def assert_stops(ask: Callable[..., str]) -> None:
    free = ask(seed=5, max_tokens=60)
    stop = stop_in(free)
    assert ask(seed=5, max_tokens=60, stop=[stop]) == free[: free.index(stop)]


CLIENTS = {"openai": OpenAI, "anthropic": Anthropic, "litellm": LiteLLM, "langchain-openai": LangChain}
SLOW = ("litellm", "langchain-openai")
CAPABILITIES = ("chat", "stream", "tools", "logprobs", "n", "stop", "seed", "structured")
CELLS = [(client, what) for client, made in CLIENTS.items() for what in CAPABILITIES if hasattr(made, what)]


@pytest.mark.parametrize(
    ("client", "what"),
    [pytest.param(*cell, marks=[pytest.mark.slow] if cell[0] in SLOW else []) for cell in CELLS],
)
def test_a_client_that_knows_nothing_of_slime(client: str, what: str, request: pytest.FixtureRequest) -> None:
    if what == "structured":
        pytest.importorskip("llguidance")
    where = request.getfixturevalue("calling" if what == "tools" else "url")
    getattr(CLIENTS[client](where), what)()


def test_the_table_says_what_is_tested() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|(.*)\|$", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    told = {(name, what) for name, cells in rows for what, cell in zip(CAPABILITIES, cells.split("|")) if "yes" in cell}
    assert told == set(CELLS)
