"""OpenAI's `/v1/chat/completions` <-> `Wanted` and `Answer`.

`app` calls it as an `Api`. Reasoning travels as `reasoning_content`, as SGLang and vLLM name it; OpenAI's own API has
no such field, and its clients keep it as an extra attribute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slime_serving.front.answer import Answer, Piece, arguments_json
from slime_serving.front.sampling import SamplingBody
from slime_serving.front.wanted import (
    Message,
    Wanted,
    chosen_tools,
    function_tool,
    text_of,
    tool_call,
)
from slime_serving.http.bodies import NOTHING
from slime_serving.http.errors import BadRequest, shown
from slime_serving.http.streams import DONE, event

_ERRORS = {
    **dict.fromkeys((400, 405, 413, 415), "invalid_request_error"), 401: "authentication_error",
    403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
}  # fmt: skip


class ChatMessage(BaseModel):
    """A chat message; further fields that clients copy from an answer (annotations, ...) are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Body(SamplingBody):
    """The body of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: Any = None
    verbosity: Any = None

    no_effect = SamplingBody.no_effect | {
        "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "separate_reasoning", "stream_reasoning",
    }  # fmt: skip
    only = {
        **SamplingBody.only,
        **dict.fromkeys(("continue_final_message", "functions", "audio", "prediction", "web_search_options"), NOTHING),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "add_generation_prompt": (True,),
    }


def wanted(body: Body) -> Wanted:
    """Convert the body to a `Wanted`. Raises BadRequest."""
    if body.top_logprobs and not body.logprobs:
        raise BadRequest(f"top_logprobs is {body.top_logprobs} without logprobs; add logprobs: true")
    tools, wishes = chosen_tools(body.tool_choice, body.tools, _tool)
    asked = {name: getattr(body, name) for name in ("reasoning_effort", "verbosity") if getattr(body, name) is not None}
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    made = body.wanted(max_tokens=limit)
    made.messages = [_message(m, i) for i, m in enumerate(body.messages)]
    made.tools, made.parallel_calls = tools, body.parallel_tool_calls
    made.template_kwargs = body.chat_template_kwargs
    made.top_logprobs = body.top_logprobs if body.logprobs else None
    made.wishes |= wishes | asked
    return made


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "function") != "function":
        raise BadRequest(f"a tool of type {shown(tool.get('type'))} is not offered; allowed: function")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise BadRequest(f"a tool's function is {shown(function)}; allowed: an object")
    return function_tool(function.get("name"), function.get("description"), function.get("parameters"))


def _message(message: ChatMessage, number: int) -> Message:
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    made: Message = {"role": role, "content": text_of(message.content, f"messages[{number}].content")}
    if role == "tool" and message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    if role == "assistant":
        reasoning = message.reasoning_content or message.reasoning
        if isinstance(reasoning, str):
            made["reasoning_content"] = reasoning
        if message.tool_calls:
            made["tool_calls"] = [_sent_call(call, number) for call in message.tool_calls]
    return made


def _sent_call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    function = call.get("function") or {}
    if not isinstance(function, Mapping):
        raise BadRequest(f"messages[{number}].tool_calls: function is {shown(function)}; allowed: an object")
    return tool_call(call.get("id"), function.get("name"), function.get("arguments"))


def reply(wanted: Wanted, ident: str, answers: list[Answer]) -> dict[str, Any]:
    """Return the response object with all answers."""
    choices = [_choice(wanted, index, answer) for index, answer in enumerate(answers)]
    return {**_envelope(wanted, ident, "chat.completion"), "choices": choices, "usage": usage(answers)}


def _choice(wanted: Wanted, index: int, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_call(call) for call in answer.calls]
    else:
        message["content"] = answer.content
    log_probs = None if wanted.top_logprobs is None else {"content": answer.log_probs, "refusal": None}
    return {"index": index, "message": message, "logprobs": log_probs, "finish_reason": answer.finish}


class Stream:
    """The chunks of streamed answers."""

    def __init__(self, wanted: Wanted, ident: str, prompt_tokens: int) -> None:
        self.wanted, self.ident = wanted, ident

    def begin(self, choice: int) -> Iterator[bytes]:
        """Yield the chunk with the role."""
        yield self._chunk(choice, {"role": "assistant", "content": ""})

    def piece(self, choice: int, piece: Piece) -> Iterator[bytes]:
        """Yield the chunks with new text."""
        if piece.reasoning:
            yield self._chunk(choice, {"reasoning_content": piece.reasoning})
        if piece.content:
            yield self._chunk(choice, {"content": piece.content}, None, piece.log_probs)

    def end(self, choice: int, answer: Answer) -> Iterator[bytes]:
        """Yield the chunks with calls, finish reason and the remaining log-probs."""
        for number, call in enumerate(answer.calls):
            made = _call(call)
            arguments = made["function"].pop("arguments")
            head = {"index": number, **made, "function": {**made["function"], "arguments": ""}}
            yield self._chunk(choice, {"tool_calls": [head]})
            yield self._chunk(choice, {"tool_calls": [{"index": number, "function": {"arguments": arguments}}]})
        yield self._chunk(choice, {}, answer.finish, answer.log_probs[answer.known_log_probs :])

    def close(self, answers: list[Answer]) -> Iterator[bytes]:
        """Yield the usage, if requested, and the end marker."""
        if self.wanted.include_usage:
            envelope = _envelope(self.wanted, self.ident, "chat.completion.chunk")
            yield event({**envelope, "choices": [], "usage": usage(answers)})
        yield DONE

    def failed(self, status: int, message: str) -> Iterator[bytes]:
        """Yield an error event, for an error after the status was sent."""
        yield event(error(status, message))

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None = None, log_probs: Any = ()) -> bytes:
        wanted = self.wanted.top_logprobs is not None and log_probs
        told = {"content": list(log_probs), "refusal": None} if wanted else None
        choice = {"index": index, "delta": delta, "logprobs": told, "finish_reason": finish}
        return event({**_envelope(self.wanted, self.ident, "chat.completion.chunk"), "choices": [choice]})


def error(status: int, message: str) -> dict[str, Any]:
    """Return OpenAI's error object."""
    kind = _ERRORS.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": str(status)}}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": arguments_json(dict(call))}
    return {"id": call["id"], "type": "function", "function": function}


def _envelope(wanted: Wanted, ident: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{ident}", "object": kind, "created": int(time.time()), "model": wanted.model}


def usage(answers: list[Answer]) -> dict[str, Any]:
    """Return the token counts of all answers; a prompt with several answers counts once."""
    prompts = sum(answer.prompt_tokens for answer in answers if answer.first_of_prompt)
    sampled = sum(answer.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": sampled,
        "total_tokens": prompts + sampled,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in answers)},
    }
