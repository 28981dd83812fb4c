"""Convert Anthropic's `/v1/messages` and `/v1/messages/count_tokens` to `Wanted` and from `Answer`.

`app` calls this module as an `Api`. One message of the client may become several template messages: tool results are
separate messages, in order, before the user's text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slime_serving.front.answer import Answer, Piece, arguments_json
from slime_serving.front.wanted import Message, Wanted, function_tool, text_of, tool_call
from slime_serving.http import bodies
from slime_serving.http.bodies import NOTHING, Stops
from slime_serving.http.errors import BadRequest, shown
from slime_serving.http.streams import event

_WISHES = ("thinking", "context_management", "output_config", "container", "speed")
_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 415: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class InputMessage(BaseModel):
    """A message in the client's request."""

    model_config = ConfigDict(strict=True, extra="ignore")
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountBody(bodies.Body):
    """The body of `/v1/messages/count_tokens`."""

    messages: list[InputMessage] = Field(min_length=1)
    model: str = ""
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] = {}
    thinking: dict[str, Any] | None = None
    context_management: Any = None
    output_config: Any = None
    speed: Any = None
    metadata: dict[str, Any] = {}
    user: str | None = None

    no_effect = frozenset({"service_tier", "betas", "inference_geo", "cache_control"})
    only = {"mcp_servers": NOTHING, "output_format": ({"type": "text"},)}


class Body(CountBody):
    """The body of `/v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Stops = []
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    container: Any = None


def wanted(body: CountBody) -> Wanted:
    """Return the request in the common form. Raises BadRequest."""
    system = text_of(body.system, "system", ("text",))
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(body.messages):
        messages += _messages(message, number)
    choice = body.tool_choice.get("type", "auto")
    wishes = {name: getattr(body, name, None) for name in _WISHES}
    wishes = {name: value for name, value in wishes.items() if value not in (None, {"type": "disabled"})}
    if choice not in ("auto", "none"):
        wishes["tool_choice"] = body.tool_choice
    made = Wanted(
        messages=messages,
        tools=[_tool(tool) for tool in body.tools] if choice != "none" else [],
        parallel_calls=not body.tool_choice.get("disable_parallel_tool_use"),
        separate_reasoning=True,
        model=body.model,
        wishes=wishes,
    )
    if isinstance(body, Body):
        made.stream, made.max_tokens, made.stop = body.stream, body.max_tokens, body.stop_sequences
        given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
        made.sampling = {name: value for name, value in given.items() if value is not None}
    return made


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise BadRequest(f"a tool of type {shown(tool['type'])} is not offered; allowed: custom, with an input_schema")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _messages(message: InputMessage, number: int) -> list[Message]:
    where, content = f"messages[{number}]", message.content
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if message.role == "assistant":
        return [_assistant(blocks, where)]
    made: list[Message] = []
    texts: list[Mapping[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            made.append(_result(block, where))
        else:
            texts.append(block)
    if texts:
        made.append({"role": message.role, "content": text_of(texts, f"{where}.content", ("text",))})
    return made


def _result(block: Mapping[str, Any], where: str) -> Message:
    text = text_of(block.get("content"), f"{where}.content[tool_result]", ("text",))
    text = f"Error: {text}" if block.get("is_error") and not text.lower().startswith("error") else text
    return {"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id") or "")}


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    calls = [b for b in blocks if b.get("type") == "tool_use"]
    thoughts = [str(b.get("thinking") or "") for b in blocks if b.get("type") == "thinking"]
    rest = [b for b in blocks if b.get("type") not in ("tool_use", "thinking", "redacted_thinking")]
    made: Message = {"role": "assistant", "content": text_of(rest, f"{where}.content", ("text",))}
    if any(thoughts):
        made["reasoning_content"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = [tool_call(c.get("id"), c.get("name"), c.get("input") or {}) for c in calls]
    return made


def reply(wanted: Wanted, ident: str, answers: list[Answer]) -> dict[str, Any]:
    """Return the whole answer."""
    (answer,) = answers
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not answer.calls:
        blocks.append({"type": "text", "text": answer.content})
    blocks += [_use(call) for call in answer.calls]
    return {**_envelope(wanted, ident, answer.prompt_tokens), "content": blocks, **_ended(answer), "usage": {
        "input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens,
        "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
    }}  # fmt: skip


class Stream:
    """Events of a streamed answer."""

    def __init__(self, wanted: Wanted, ident: str, prompt_tokens: int) -> None:
        self.wanted, self.ident, self.prompt_tokens = wanted, ident, prompt_tokens
        self.blocks = 0
        self.open = ""
        """Type of the open block."""

    def begin(self, choice: int) -> Iterator[bytes]:
        """Yield the message without content."""
        message = {**_envelope(self.wanted, self.ident, self.prompt_tokens), "content": []}
        yield _event("message_start", message=message)

    def piece(self, choice: int, piece: Piece) -> Iterator[bytes]:
        """Yield the events of new text."""
        if piece.reasoning:
            yield from self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.content:
            yield from self._block("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": piece.content})

    def end(self, choice: int, answer: Answer) -> Iterator[bytes]:
        """Yield the calls and the stop reason."""
        if not self.open and not answer.calls:
            yield from self._block("text", {"type": "text", "text": ""})
        for call in answer.calls:
            yield from self._close()
            yield from self._block("tool_use", {**_use(call), "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": arguments_json(call)})
        yield from self._close()
        yield _event("message_delta", delta=_ended(answer), usage={"output_tokens": answer.completion_tokens})
        yield _event("message_stop")

    def close(self, answers: list[Answer]) -> Iterator[bytes]:
        """Yield nothing: `end` has sent the last events."""
        return iter(())

    def failed(self, status: int, message: str) -> Iterator[bytes]:
        """Yield an error after the status was sent."""
        yield event(error(status, message), "error")

    def _block(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self.open == kind:
            return
        yield from self._close()
        self.open = kind
        yield _event("content_block_start", index=self.blocks, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self.open:
            yield _event("content_block_stop", index=self.blocks)
            self.open = ""
            self.blocks += 1

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self.blocks, delta=delta)


def error(status: int, message: str) -> dict[str, Any]:
    """Return Anthropic's error object."""
    return {"type": "error", "error": {"type": _ERRORS.get(status, "api_error"), "message": message}}


def _event(name: str, /, **values: Any) -> bytes:
    return event({"type": name, **values}, name)


def _use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}


def _ended(answer: Answer) -> dict[str, Any]:
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(answer.finish, "end_turn")
    if answer.stop_match is not None and reason == "end_turn":
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_match}
    return {"stop_reason": reason, "stop_sequence": None}


def _envelope(wanted: Wanted, ident: str, prompt_tokens: int) -> dict[str, Any]:
    return {
        "id": f"msg_{ident}", "type": "message", "role": "assistant", "model": wanted.model, "stop_reason": None,
        "stop_sequence": None, "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
    }  # fmt: skip
