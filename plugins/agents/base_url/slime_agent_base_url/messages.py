"""What a client sent, in one form for all three APIs: chat messages as templates take them, tools, and wishes.

`openai_chat`, `openai_responses` and `anthropic_messages` make a `Wanted` of a request's body; `prompts` renders its
messages and `tree` finds them again in the next request. What a reader would get wrong: two assistant messages are the
same when content and calls are, whatever the ids of the calls and the white space around the text. A client may leave
the reasoning of earlier turns out; what it sends of it has to be what was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

Message: TypeAlias = dict[str, Any]
"""`role` system, user, assistant or tool; `content`, a string; of an assistant also `reasoning_content` and
`tool_calls` with arguments as objects; of a tool `tool_call_id`."""


class BadRequest(ValueError):
    """The request cannot be served as it is; answered with status 400 in the API's own shape."""


class Key(NamedTuple):
    """What two messages have in common when they are the same message."""

    role: str
    content: str
    calls: str = ""
    """Names and arguments, as canonical JSON."""


@dataclass
class Wanted:
    """One request, without its API."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """`{"type": "function", "function": {...}}` each."""
    stream: bool = False
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    temperature: float | None = None
    top_p: float | None = None
    logprobs: bool = False
    include_usage: bool = False
    """Chat completions: a last chunk with the usage."""
    model: str = ""
    """As the client names it; answered back, and otherwise without meaning."""
    ignored: list[str] = field(default_factory=list)
    """Fields that were asked for and have no effect."""
    instructions: str = ""
    """Responses API: the system message, which later responses do not inherit."""
    previous: str | None = None
    """Responses API: the response that `messages` follow."""
    conversation: list[Message] = field(default_factory=list)
    """Responses API: `messages` without instructions, as `Session.resolve` found them."""
    echo: dict[str, Any] = field(default_factory=dict)
    """Responses API: fields that are answered back as they came."""


def key_of(message: Mapping[str, Any]) -> Key:
    """The key of one message."""
    content = str(message.get("content") or "")
    if message["role"] != "assistant":
        return Key(message["role"], content)
    calls = [call["function"] for call in message.get("tool_calls") or []]
    text = canonical([[c["name"], c["arguments"]] for c in calls]) if calls else ""
    return Key("assistant", content.strip(), text)


def same_reasoning(sampled: Mapping[str, Any], sent: Mapping[str, Any]) -> bool:
    """False when the client sent reasoning that is not the sampled one."""
    theirs = str(sent.get("reasoning_content") or "").strip()
    return not theirs or theirs == str(sampled.get("reasoning_content") or "").strip()


def canonical(value: Any) -> str:
    """JSON that is the same text for the same value."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def function_tool(name: Any, description: Any, parameters: Any, strict: Any = None) -> dict[str, Any]:
    """A tool schema as chat templates take it. Raises BadRequest for one without a name."""
    if not isinstance(name, str) or not name:
        raise BadRequest(f"a tool has the name {name!r}; allowed: a non-empty string")
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def tool_call(ident: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A call in an assistant's message; `arguments` may be JSON text. Text that is none is kept under "raw"."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except json.JSONDecodeError:
            arguments = {"raw": arguments}
    if not isinstance(arguments, dict):
        arguments = {"raw": arguments}
    return {"id": str(ident or ""), "type": "function", "function": {"name": str(name), "arguments": arguments}}


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text", "input_text", "output_text")) -> str:
    """A message's content: a string, or text parts one after the other. Raises BadRequest for anything else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} is {type(content).__name__}; allowed: a string or a list of parts")
    pieces = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind == "refusal":
            pieces.append(str(part.get("refusal") or ""))
        elif kind in kinds:
            pieces.append(str(part.get("text") or ""))
        else:
            raise BadRequest(f"{where} has a part of type {kind!r}; allowed here: {', '.join(kinds)}")
    return "".join(pieces)


def take(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """`body[name]` of the given type; null and absent are `default`. Raises BadRequest."""
    value = body.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise BadRequest(f"{name} is {value!r}; allowed: {' or '.join(k.__name__ for k in kinds)}")
    return value


def stop_strings(value: Any, name: str = "stop") -> list[str]:
    """A string or a list of them. Raises BadRequest."""
    items = [value] if isinstance(value, str) else (value or [])
    if not isinstance(items, list) or any(not isinstance(i, str) or not i for i in items):
        raise BadRequest(f"{name} is {value!r}; allowed: a non-empty string, or a list of them")
    return list(items)


def check_fields(
    body: Mapping[str, Any], known: frozenset[str], ignored: frozenset[str], refused: Mapping[str, str]
) -> list[str]:
    """The fields of `body` that have no effect. Raises BadRequest for one that is refused or that nobody knows."""
    without_effect = []
    for name, value in body.items():
        if value is None or name in known:
            continue
        if name in refused:
            raise BadRequest(f"{name} is not offered: {refused[name]}")
        if name not in ignored:
            raise BadRequest(f"unknown field {name!r}; known: {', '.join(sorted(known | ignored))}")
        if value not in (False, [], {}, ""):
            without_effect.append(name)
    return without_effect
