"""slime's tool-call parsers against those of the installed SGLang, on the same turns.

Calls are compared by name and arguments; SGLang's drop what is around them, and calls that cannot be read, so neither
is compared. What differs: SGLang's pythonic parser reads no negative number (its syntax tree has an operator before a
number), ours does, so its turns here have none.
"""

from __future__ import annotations

import json
import os
import random
import string
import subprocess
from pathlib import Path
from typing import Any

import pytest
from slime_engine_sglang.environment import server_environment

from slime_core.plugins.resolve import resolve
from slime_core.tools import ToolCall

pytestmark = [pytest.mark.backends, pytest.mark.timeout(900)]

THEIRS = {
    "deepseek_v3": "deepseekv3",
    "deepseek_v31": "deepseekv31",
    "glm45": "glm45",
    "hermes": "hermes",
    "kimi_k2": "kimi_k2",
    "llama3": "llama3",
    "minimax_m2": "minimax-m2",
    "pythonic": "pythonic",
    "qwen": "qwen25",
    "qwen3_coder": "qwen3_coder",
}
"""Our parser -> SGLang's."""
GLM47 = "<tool_call>weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
"""Without newlines: SGLang has a parser of its own for this, ours reads both."""

PARSE = """
import json, sys
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
turns = json.load(sys.stdin)
found = []
for name, tools, text in turns:
    parser = FunctionCallParser([Tool.model_validate(tool) for tool in tools], name)
    _, calls = parser.parse_non_stream(text)
    found.append([[call.name, json.loads(call.parameters)] for call in calls])
print("\\n" + json.dumps(found))
"""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "share": {"type": "number"},
                    "exact": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "where": {"type": "object"},
                },
            },
        },
    }
    for name in ("weather", "search_web", "f2")
]

WRITTEN = {
    "hermes": ['<tool_call>{"name": "weather", "arguments": {}}</tool_call>'],
    "qwen": [
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>',
        '<tool_call>\n{"name": "weather", "arguments": {"city": \n</tool_call>',
    ],
    "llama3": ['<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}', "{} is JSON", "no call"],
    "pythonic": ["<|python_start|>[weather(city='Oslo')]<|python_end|>", "[1, 2]"],
    "kimi_k2": ["no call"],
}
"""Turns beside those that our parsers write."""


def value(random_: random.Random, kind: str) -> Any:
    word = "".join(random_.choices(string.ascii_letters + " .,:;'\"-_\u00e9\u6771", k=random_.randint(1, 12))).strip()
    made = {
        "string": word or "x",
        "integer": random_.randint(-1000, 1000),
        "number": round(random_.uniform(-5, 5), 3),
        "boolean": random_.random() < 0.5,
        "array": [word[:3], "b"],
        "object": {"a": {"b": [1, word[:2]]}},
    }
    return made[kind]


def calls(random_: random.Random, count: int, ours: str) -> list[ToolCall]:
    properties = TOOLS[0]["function"]["parameters"]["properties"]
    made = []
    for tool in random_.choices(TOOLS, k=count):
        keys = random_.sample(list(properties), random_.randint(1, 4))
        arguments = {key: value(random_, properties[key]["type"]) for key in keys}
        if ours == "pythonic":
            arguments = {k: abs(v) if type(v) in (int, float) else v for k, v in arguments.items()}
        made.append(ToolCall("", tool["function"]["name"], arguments))
    return made


@pytest.fixture(scope="module")
def turns() -> list[tuple[str, str, str]]:
    """(our parser, theirs, turn)."""
    random_ = random.Random(20)
    made = [(ours, THEIRS[ours], text) for ours, texts in WRITTEN.items() for text in texts]
    made.append(("glm45", "glm47", GLM47))
    for ours in THEIRS:
        parser = resolve("tool_parsers", ours).obj()
        texts = [parser.render(calls(random_, count, ours)) for count in (1, 1, 1, 1, 2, 3) for _ in range(6)]
        made += [(ours, THEIRS[ours], text) for text in texts]
    return made


@pytest.fixture(scope="module")
def theirs(sglang_python: Path, turns: list[tuple[str, str, str]]) -> list[list[list[Any]]]:
    done = subprocess.run(
        [str(sglang_python), "-c", PARSE],
        input=json.dumps([(name, TOOLS, text) for _, name, text in turns]),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **server_environment("cpu", python=sglang_python)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[list[Any]]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("ours", sorted(THEIRS))
def test_the_same_calls_are_read(ours: str, turns: list[tuple[str, str, str]], theirs: list[list[list[Any]]]) -> None:
    parser = resolve("tool_parsers", ours).obj()
    compared = [(text, answer) for (name, _, text), answer in zip(turns, theirs) if name == ours]
    assert len(compared) >= 36
    for text, answer in compared:
        read = [[call.name, call.arguments] for call in parser.parse(text, TOOLS).calls]
        assert read == answer, text
