"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens` <-> `Wanted` and `Answer`.

`server` calls it as an `Api`. What a reader would get wrong: one message of the client may be several of a template:
results of tools are messages of their own, in order, before the user's text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime_agent_base_url.answer import Answer, arguments_json
from slime_agent_base_url.messages import (
    BadRequest,
    Message,
    Wanted,
    check_fields,
    function_tool,
    stop_strings,
    take,
    text_of,
    tool_call,
)
from slime_agent_base_url.openai_chat import positive
from slime_agent_base_url.sse import event

_KNOWN = frozenset({
    "messages", "model", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream", "temperature",
    "top_p", "metadata",
})  # fmt: skip
_IGNORED = frozenset({
    "top_k", "thinking", "service_tier", "container", "context_management", "betas", "output_config", "speed",
    "inference_geo", "cache_control",
})  # fmt: skip
_REFUSED = {"mcp_servers": "the server calls no tools itself", "output_format": "what is sampled is not constrained"}
_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error",
    503: "overloaded_error",
}  # fmt: skip


def wanted(body: Mapping[str, Any]) -> Wanted:
    """The request. Raises BadRequest."""
    if body.get("max_tokens") is None:
        raise BadRequest("max_tokens is missing; Anthropic's API requires it")
    return _wanted(body)


def counted(body: Mapping[str, Any]) -> Wanted:
    """The request of `count_tokens`, which has no limit. Raises BadRequest."""
    return _wanted(body)


def _wanted(body: Mapping[str, Any]) -> Wanted:
    ignored = check_fields(body, _KNOWN, _IGNORED, _REFUSED)
    system = text_of(body.get("system"), "system", ("text",))
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(take(body, "messages", list, [])):
        messages += _messages(message, number)
    choice = take(body, "tool_choice", dict, {})
    tools = [_tool(t) for t in take(body, "tools", list, [])] if choice.get("type") != "none" else []
    if choice.get("type") in ("any", "tool") or choice.get("disable_parallel_tool_use"):
        ignored = [*ignored, "tool_choice"]
    return Wanted(
        messages=messages,
        tools=tools,
        stream=take(body, "stream", bool, False),
        max_tokens=positive(take(body, "max_tokens", int), "max_tokens"),
        stop=stop_strings(body.get("stop_sequences"), "stop_sequences"),
        temperature=take(body, "temperature", (int, float)),
        top_p=take(body, "top_p", (int, float)),
        model=take(body, "model", str, ""),
        ignored=ignored,
    )


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") != "custom":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise BadRequest(f"a tool of type {kind!r} is not offered; allowed: custom, with an input_schema")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _messages(message: Any, number: int) -> list[Message]:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant", "system"):
        role = message.get("role") if isinstance(message, Mapping) else message
        raise BadRequest(f"{where}.role is {role!r}; allowed: user, assistant, system")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or any(not isinstance(block, Mapping) for block in blocks):
        raise BadRequest(f"{where}.content is {type(content).__name__}; allowed: a string or a list of blocks")
    if message["role"] == "assistant":
        return [_assistant(blocks, where)]
    made: list[Message] = []
    texts: list[Mapping[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            made.append(_result(block, where))
        else:
            texts.append(block)
    if texts:
        made.append({"role": message["role"], "content": text_of(texts, f"{where}.content", ("text",))})
    return made


def _result(block: Mapping[str, Any], where: str) -> Message:
    text = text_of(block.get("content"), f"{where}.content[tool_result]", ("text",))
    text = f"Error: {text}" if block.get("is_error") and not text.lower().startswith("error") else text
    return {"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id") or "")}


def _assistant(blocks: list[Mapping[str, Any]], where: str) -> Message:
    calls = [b for b in blocks if b.get("type") == "tool_use"]
    thoughts = [str(b.get("thinking") or "") for b in blocks if b.get("type") == "thinking"]
    rest = [b for b in blocks if b.get("type") not in ("tool_use", "thinking", "redacted_thinking")]
    made: Message = {"role": "assistant", "content": text_of(rest, f"{where}.content", ("text",))}
    if any(thoughts):
        made["reasoning_content"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = [tool_call(c.get("id"), c.get("name"), c.get("input") or {}) for c in calls]
    return made


def reply(wanted: Wanted, ident: str, answer: Answer) -> dict[str, Any]:
    """The whole answer."""
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
    """Events of one answer."""

    def __init__(self, wanted: Wanted, ident: str, prompt_tokens: int) -> None:
        self.wanted, self.ident, self.prompt_tokens = wanted, ident, prompt_tokens
        self.blocks = 0
        self.open = ""
        """Type of the block that is open."""

    def begin(self) -> Iterator[bytes]:
        """The message without content."""
        message = {**_envelope(self.wanted, self.ident, self.prompt_tokens), "content": []}
        yield _event("message_start", message=message)

    def piece(self, reasoning: str, content: str) -> Iterator[bytes]:
        """New text."""
        if reasoning:
            yield from self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": reasoning})
        if content:
            yield from self._block("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": content})

    def end(self, answer: Answer) -> Iterator[bytes]:
        """Calls, and why it ended."""
        if not self.open and not answer.calls:
            yield from self._block("text", {"type": "text", "text": ""})
        for call in answer.calls:
            yield from self._close()
            yield from self._block("tool_use", {**_use(call), "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": arguments_json(call)})
        yield from self._close()
        yield _event("message_delta", delta=_ended(answer), usage={"output_tokens": answer.completion_tokens})
        yield _event("message_stop")

    def failed(self, status: int, message: str) -> Iterator[bytes]:
        """An error after the status was sent."""
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
    """Anthropic's error object."""
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
