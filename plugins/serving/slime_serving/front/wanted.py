"""A client's request, in one form for all APIs: chat messages as templates take them, tools, and wishes.

The API modules convert a request's body to a `Wanted`; a `Desk` answers it. A wish is a field that would change the
answer. A desk applies a wish, refuses it, or counts it as having no effect; a desk never drops it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from slime_serving.http.errors import BadRequest, shown

Message: TypeAlias = dict[str, Any]
"""Chat message: `role` system, user, assistant or tool; `content`, a string; for an assistant also `reasoning_content`
and `tool_calls` with arguments as objects; for a tool `tool_call_id`."""
TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass
class Wanted:
    """A request, independent of its API."""

    messages: list[Message] = field(default_factory=list)
    prompts: list[str | list[int]] = field(default_factory=list)
    """Prompts in place of messages: text or ids."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools, each `{"type": "function", "function": {...}}`."""
    parallel_calls: bool = True
    stream: bool = False
    n: int = 1
    """Number of answers per prompt."""
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    """Other sampling parameters of the request, by SGLang's names."""
    top_logprobs: int | None = None
    """Number of alternatives per token; None for no log-probs."""
    separate_reasoning: bool = False
    """True if the API has a separate field for the model's reasoning."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    include_usage: bool = False
    """For streams: whether a last chunk with the usage is sent."""
    rid: str | None = None
    model: str = ""
    """Model name in the request; it is returned in the answer and not used otherwise."""
    wishes: dict[str, Any] = field(default_factory=dict)
    """Values of the request's other fields, by name."""
    instructions: str = ""
    """Responses API: the system message, which later responses do not inherit."""
    previous: str | None = None
    """Responses API: the response that `messages` follow."""
    conversation: list[Message] = field(default_factory=list)
    """Responses API: `messages` without instructions, as `Conversations.resolve` found them."""
    echo: dict[str, Any] = field(default_factory=dict)
    """Responses API: fields that are returned unchanged."""


class Conversations:
    """Responses API: the conversation through each response, for `previous_response_id`."""

    def __init__(self, most: int | None = None) -> None:
        """Create the store. `most`: number of newest responses to keep; None keeps all."""
        self._most = most
        self._found: OrderedDict[str, list[Message]] = OrderedDict()

    def resolve(self, wanted: Wanted) -> None:
        """Insert the referenced conversation into the request's messages. Raises BadRequest for an unknown response."""
        if wanted.previous is not None:
            if wanted.previous not in self._found:
                raise BadRequest(f"previous_response_id {shown(wanted.previous)} is no response that is known here")
            wanted.messages = [*self._found[wanted.previous], *wanted.messages]
        wanted.conversation = wanted.messages
        if wanted.instructions:
            wanted.messages = [{"role": "system", "content": wanted.instructions}, *wanted.messages]

    def remember(self, response: str, wanted: Wanted, message: Message) -> None:
        """Store the conversation for a later `previous_response_id`."""
        self._found[response] = [*wanted.conversation, message]
        if self._most is not None and len(self._found) > self._most:
            self._found.popitem(last=False)


def function_tool(name: Any, description: Any, parameters: Any, strict: Any = None) -> dict[str, Any]:
    """Return a tool schema in the form of chat templates. Raises BadRequest if it has no name."""
    if not isinstance(name, str) or not name:
        raise BadRequest(f"a tool has the name {shown(name)}; allowed: a non-empty string")
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def tool_call(ident: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return a call of an assistant's message. `arguments` may be JSON text; other text is kept under "raw"."""
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments) if arguments.strip() else {}
            json.dumps(read, ensure_ascii=False).encode()  # an escape may be half of a character
            arguments = read
        except (ValueError, RecursionError):
            arguments = {"raw": arguments}
    if not isinstance(arguments, dict):
        arguments = {"raw": arguments}
    return {"id": str(ident or ""), "type": "function", "function": {"name": str(name), "arguments": arguments}}


def text_of(content: Any, where: str, kinds: Sequence[str] = TEXT_PARTS) -> str:
    """Return a message's content: a string, or joined text parts. Raises BadRequest for anything else."""
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
        elif isinstance(kind, str) and kind in kinds:
            pieces.append(str(part.get("text") or ""))
        else:
            raise BadRequest(f"{where} has a part of type {shown(kind)}; allowed here: {', '.join(kinds)}")
    return "".join(pieces)


def chosen_tools(
    choice: Any, tools: list[Any], read: Callable[[Any], dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the tools that the model sees, and wishes such as a forced call, from OpenAI's tools."""
    if choice in ("none", {"type": "none"}):
        return [], {}
    shown_tools = [read(tool) for tool in tools]
    return shown_tools, {} if choice in (None, "auto", {"type": "auto"}) else {"tool_choice": choice}


def response_format(form: Mapping[str, Any] | None) -> dict[str, Any]:
    """Convert OpenAI's `response_format` or `text.format` to SGLang's sampling parameter. Raises BadRequest."""
    kind = (form or {}).get("type", "text")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if kind == "json_schema":
        inner = (form or {}).get("json_schema", form)
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping):
            raise BadRequest("response_format of type 'json_schema' needs a `schema`, an object")
        return {"json_schema": json.dumps(schema)}
    raise BadRequest(f"response_format {shown(kind)} is not offered; allowed: text, json_object, json_schema")
