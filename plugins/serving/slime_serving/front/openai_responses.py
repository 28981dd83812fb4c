"""OpenAI's `/v1/responses` <-> `Wanted` and `Answer`.

`app` calls it as an `Api`. A response has several items (reasoning, message, calls). When a client sends them back,
they are merged into one assistant message. The desk resolves `previous_response_id`, so both ways to continue give the
same conversation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from slime_serving.front.answer import Answer, Piece, arguments_json
from slime_serving.front.openai_chat import error
from slime_serving.front.wanted import (
    Message,
    Wanted,
    chosen_tools,
    function_tool,
    response_format,
    text_of,
    tool_call,
)
from slime_serving.http import bodies
from slime_serving.http.bodies import NOTHING
from slime_serving.http.errors import BadRequest, shown
from slime_serving.http.streams import event

__all__ = ["Body", "Stream", "error", "reply", "wanted"]

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_WISHES = ("reasoning", "max_tool_calls", "include")


class Body(bodies.Body):
    """The body of `/v1/responses`."""

    input: str | list[dict[str, Any]] = Field([], max_length=1 << 24)
    instructions: str = ""
    model: str = ""
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    stream: bool = False
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    previous_response_id: str | None = None
    text: dict[str, Any] = {}
    reasoning: Any = None
    include: list[Any] = []
    max_tool_calls: int | None = None
    metadata: dict[str, Any] = {}
    user: str | None = None

    no_effect = frozenset({
        "store", "truncation", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
        "stream_options", "client_metadata", "priority",
    })  # fmt: skip
    only = dict.fromkeys(("background", "conversation", "prompt", "context_management", "top_logprobs"), NOTHING)


def wanted(body: Body) -> Wanted:
    """Read the request. Raises BadRequest."""
    form = body.text.get("format")
    if form is not None and not isinstance(form, Mapping):
        raise BadRequest(f"text.format is {shown(form)}; allowed: an object")
    tools, wishes = chosen_tools(body.tool_choice, body.tools, _tool)
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    given = {name: getattr(body, name) for name in _SAMPLING}
    return Wanted(
        messages=_messages(items),
        instructions=body.instructions,
        previous=body.previous_response_id,
        tools=tools,
        parallel_calls=body.parallel_tool_calls,
        separate_reasoning=True,
        stream=body.stream,
        max_tokens=body.max_output_tokens,
        sampling={name: value for name, value in given.items() if value is not None} | response_format(form),
        model=body.model,
        wishes=wishes | {name: getattr(body, name) for name in _WISHES if getattr(body, name)},
        echo={"tools": body.tools, "metadata": body.metadata, "text": body.text or {"format": {"type": "text"}}},
    )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise BadRequest(f"a tool of type {shown(tool.get('type'))} is not offered; allowed: function")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _messages(items: list[dict[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    open_answer: Message | None = None
    for number, item in enumerate(items):
        kind = item.get("type") or "message"
        if kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant"):
            if open_answer is None or _begins_another(open_answer, kind):
                open_answer = {"role": "assistant", "content": ""}
                messages.append(open_answer)
            _add_to(open_answer, item, kind, number)
        else:
            open_answer = None
            messages.append(_message(item, kind, number))
    return messages


def _begins_another(answer: Message, kind: str) -> bool:
    """Return whether an item begins another response; the items of one come in order: reasoning, message, calls."""
    if kind == "reasoning":
        return bool(answer["content"] or answer.get("tool_calls") or answer.get("reasoning_content"))
    return kind == "message" and bool(answer["content"] or answer.get("tool_calls"))


def _add_to(answer: Message, item: Mapping[str, Any], kind: Any, number: int) -> None:
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        thoughts = text_of(parts, f"input[{number}].content", ("reasoning_text", "summary_text", "text"))
        if thoughts:
            answer["reasoning_content"] = thoughts
    elif kind == "message":
        answer["content"] = text_of(item.get("content"), f"input[{number}].content")
    else:
        call = tool_call(item.get("call_id"), item.get("name"), item.get("arguments"))
        answer.setdefault("tool_calls", []).append(call)


def _message(item: Mapping[str, Any], kind: Any, number: int) -> Message:
    if kind == "function_call_output":
        text = text_of(item.get("output"), f"input[{number}].output")
        return {"role": "tool", "content": text, "tool_call_id": str(item.get("call_id") or "")}
    role = "system" if item.get("role") == "developer" else item.get("role")
    if kind != "message" or role not in ("system", "user"):
        what = f"type is {shown(kind)}" if kind != "message" else f"role is {shown(role)}"
        raise BadRequest(
            f"input[{number}].{what}; allowed: messages of system, developer, user and assistant, reasoning,"
            " function_call, function_call_output"
        )
    return {"role": role, "content": text_of(item.get("content"), f"input[{number}].content")}


def reply(wanted: Wanted, ident: str, answers: list[Answer]) -> dict[str, Any]:
    """Return the body of a complete response."""
    (answer,) = answers
    items = []
    if answer.reasoning:
        items.append(_reasoning(ident, answer.reasoning))
    if answer.content or not answer.calls:
        items.append(_text(ident, answer.content))
    items += [_call(ident, n, call) for n, call in enumerate(answer.calls)]
    return _ended(wanted, ident, items, answer)


class Stream:
    """The event stream of one response."""

    def __init__(self, wanted: Wanted, ident: str, prompt_tokens: int) -> None:
        self.wanted, self.ident = wanted, ident
        self.sequence = 0
        self.items: list[dict[str, Any]] = []
        self.open = ""
        """Type of the open item, the last of `items`; empty if no item is open."""
        self.text = ""
        """Text of the open item."""

    def begin(self, choice: int) -> Iterator[bytes]:
        """Yield the events that begin a response, without output."""
        response = _response(self.wanted, self.ident, "in_progress", [])
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def piece(self, choice: int, piece: Piece) -> Iterator[bytes]:
        """Yield the events of new text."""
        for kind, text in (("reasoning", piece.reasoning), ("message", piece.content)):
            if text:
                yield from self._open(kind)
                self.text += text
                name = "response.reasoning_text.delta" if kind == "reasoning" else "response.output_text.delta"
                logprobs: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
                yield self._event(name, **self._where(), delta=text, **logprobs)

    def end(self, choice: int, answer: Answer) -> Iterator[bytes]:
        """Yield the events of tool calls, and the complete response."""
        if self.open != "message" and not answer.calls:
            yield from self._open("message")
        yield from self._close()
        for number, call in enumerate(answer.calls):
            item = _call(self.ident, number, call)
            at = {"output_index": len(self.items), "item_id": item["id"]}
            begun = {**item, "arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=len(self.items), item=begun)
            yield self._event("response.function_call_arguments.delta", **at, delta=item["arguments"])
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **at, **done)
            yield self._event("response.output_item.done", output_index=len(self.items), item=item)
            self.items.append(item)
        response = _ended(self.wanted, self.ident, self.items, answer)
        yield self._event(f"response.{response['status']}", response=response)

    def close(self, answers: list[Answer]) -> Iterator[bytes]:
        """Yield nothing: this API has no final event."""
        return iter(())

    def failed(self, status: int, message: str) -> Iterator[bytes]:
        """Yield the event of an error that occurred after the HTTP status was sent."""
        response = _response(self.wanted, self.ident, "failed", self.items)
        response["error"] = {"code": "server_error", "message": message}
        yield self._event("response.failed", response=response)

    def _where(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"], "content_index": 0}

    def _open(self, kind: str) -> Iterator[bytes]:
        if self.open == kind:
            return
        yield from self._close()
        item = _reasoning(self.ident, "") if kind == "reasoning" else _text(self.ident, "")
        self.open, self.text = kind, ""
        self.items.append(item)
        begun = {**item, "content": [], "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=len(self.items) - 1, item=begun)
        yield self._event("response.content_part.added", **self._where(), part=item["content"][0])

    def _close(self) -> Iterator[bytes]:
        if not self.open:
            return
        thinks = self.open == "reasoning"
        item = _reasoning(self.ident, self.text) if thinks else _text(self.ident, self.text)
        self.items[-1] = item
        name = "response.reasoning_text.done" if thinks else "response.output_text.done"
        yield self._event(name, **self._where(), text=self.text, **({} if thinks else {"logprobs": []}))
        yield self._event("response.content_part.done", **self._where(), part=item["content"][0])
        yield self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)
        self.open = ""

    def _event(self, name: str, /, **values: Any) -> bytes:
        self.sequence += 1
        return event({"type": name, "sequence_number": self.sequence - 1, **values}, name)


def response_id(ident: str) -> str:
    """Return the id that `previous_response_id` refers to."""
    return f"resp_{ident}"


def _reasoning(ident: str, text: str) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": f"rs_{ident}", "summary": [], "content": [part], "status": "completed"}


def _text(ident: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": f"msg_{ident}", "role": "assistant", "status": "completed", "content": [part]}


def _call(ident: str, number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function_call", "id": f"fc_{ident}_{number}", "call_id": call["id"], "status": "completed",
        "name": call["function"]["name"], "arguments": arguments_json(dict(call)),
    }  # fmt: skip


def _ended(wanted: Wanted, ident: str, items: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
    cut = answer.finish == "length"
    response = _response(wanted, ident, "incomplete" if cut else "completed", items)
    response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
    response["usage"] = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    return response


def _response(wanted: Wanted, ident: str, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": response_id(ident), "object": "response", "created_at": int(time.time()), "status": status,
        "background": False, "error": None, "incomplete_details": None, "instructions": wanted.instructions or None,
        "max_output_tokens": wanted.max_tokens, "model": wanted.model, "output": list(items),
        "parallel_tool_calls": wanted.parallel_calls, "previous_response_id": wanted.previous, "tool_choice": "auto",
        "temperature": wanted.sampling.get("temperature"), "top_p": wanted.sampling.get("top_p"),
        "truncation": "disabled", "usage": None, "store": True, **wanted.echo,
    }  # fmt: skip
