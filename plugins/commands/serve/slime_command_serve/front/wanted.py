"""What a client asked for, in one form for all APIs: chat messages as templates take them, tools, and wishes.

The modules of the APIs make a `Wanted` of a request's body; a `Desk` answers it. A wish is what would change the
answer. A desk does it, refuses it, or counts it as having no effect; it never drops it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from slime_command_serve.http.errors import BadRequest, shown

Message: TypeAlias = dict[str, Any]
"""`role` system, user, assistant or tool; `content`, a string; of an assistant also `reasoning_content` and
`tool_calls` with arguments as objects; of a tool `tool_call_id`."""
TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass
class Wanted:
    """One request, without its API."""

    messages: list[Message] = field(default_factory=list)
    prompts: list[str | list[int]] = field(default_factory=list)
    """Instead of messages: text or ids."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """`{"type": "function", "function": {...}}` each."""
    parallel_calls: bool = True
    stream: bool = False
    n: int = 1
    """Answers per prompt."""
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    """Other sampling parameters that were given, by SGLang's names."""
    top_logprobs: int | None = None
    """Alternatives per token; None: no log-probs."""
    separate_reasoning: bool = False
    """The API has a place of its own for the model's reasoning."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    include_usage: bool = False
    """Of a stream: a last chunk with the usage."""
    rid: str | None = None
    model: str = ""
    """As the client names it; answered back, and otherwise without meaning."""
    wishes: dict[str, Any] = field(default_factory=dict)
    """Field -> value of what none of the others holds."""
    instructions: str = ""
    """Responses API: the system message, which later responses do not inherit."""
    previous: str | None = None
    """Responses API: the response that `messages` follow."""
    conversation: list[Message] = field(default_factory=list)
    """Responses API: `messages` without instructions, as `Conversations.resolve` found them."""
    echo: dict[str, Any] = field(default_factory=dict)
    """Responses API: fields that are answered back as they came."""


class Conversations:
    """Responses API: the conversation up to and with each response, for `previous_response_id`."""

    def __init__(self, most: int | None = None) -> None:
        """`most`: responses that are remembered, the newest; None: all."""
        self._most = most
        self._found: OrderedDict[str, list[Message]] = OrderedDict()

    def resolve(self, wanted: Wanted) -> None:
        """Put what the request refers to into its messages. Raises BadRequest for a response that is not known."""
        if wanted.previous is not None:
            if wanted.previous not in self._found:
                raise BadRequest(f"previous_response_id {shown(wanted.previous)} is no response that is known here")
            wanted.messages = [*self._found[wanted.previous], *wanted.messages]
        wanted.conversation = wanted.messages
        if wanted.instructions:
            wanted.messages = [{"role": "system", "content": wanted.instructions}, *wanted.messages]

    def remember(self, response: str, wanted: Wanted, message: Message) -> None:
        """Keep what `previous_response_id` may name."""
        self._found[response] = [*wanted.conversation, message]
        if self._most is not None and len(self._found) > self._most:
            self._found.popitem(last=False)


def function_tool(name: Any, description: Any, parameters: Any, strict: Any = None) -> dict[str, Any]:
    """A tool schema as chat templates take it. Raises BadRequest for one without a name."""
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
    """A call in an assistant's message; `arguments` may be JSON text. Text that is none is kept under "raw"."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (json.JSONDecodeError, RecursionError):
            arguments = {"raw": arguments}
    if not isinstance(arguments, dict):
        arguments = {"raw": arguments}
    return {"id": str(ident or ""), "type": "function", "function": {"name": str(name), "arguments": arguments}}


def text_of(content: Any, where: str, kinds: Sequence[str] = TEXT_PARTS) -> str:
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
        elif isinstance(kind, str) and kind in kinds:
            pieces.append(str(part.get("text") or ""))
        else:
            raise BadRequest(f"{where} has a part of type {shown(kind)}; allowed here: {', '.join(kinds)}")
    return "".join(pieces)


def chosen_tools(
    choice: Any, tools: list[Any], read: Callable[[Any], dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """OpenAI's tools: (those that the model is shown, wishes: to be forced to call)."""
    if choice in ("none", {"type": "none"}):
        return [], {}
    shown_tools = [read(tool) for tool in tools]
    return shown_tools, {} if choice in (None, "auto", {"type": "auto"}) else {"tool_choice": choice}


def response_format(form: Mapping[str, Any] | None) -> dict[str, Any]:
    """OpenAI's `response_format`, or `text.format`, as SGLang's sampling parameter. Raises BadRequest."""
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
