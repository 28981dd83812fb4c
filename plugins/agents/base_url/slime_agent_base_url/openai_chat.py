"""OpenAI's `/v1/chat/completions` <-> `Wanted` and `Answer`.

`server` calls it as an `Api`. What a reader would get wrong: reasoning travels as `reasoning_content`,
as SGLang and vLLM name it; OpenAI's own API has no such field, and its clients keep it as an extra attribute.
"""

from __future__ import annotations

import time
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
from slime_agent_base_url.sse import event

_KNOWN = frozenset({
    "messages", "model", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options", "max_tokens",
    "max_completion_tokens", "stop", "temperature", "top_p", "n", "logprobs", "top_logprobs", "metadata", "user",
    "response_format", "store",
})  # fmt: skip
_IGNORED = frozenset({
    "seed", "frequency_penalty", "presence_penalty", "logit_bias", "reasoning_effort", "service_tier",
    "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "verbosity", "top_k", "min_p",
    "repetition_penalty",
})  # fmt: skip
_REFUSED = {
    "functions": "use tools", "function_call": "use tool_choice", "audio": "text only", "modalities": "text only",
    "prediction": "answers are sampled by the policy alone", "web_search_options": "there is no search",
}  # fmt: skip
_ERRORS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def wanted(body: Mapping[str, Any]) -> Wanted:
    """The request. Raises BadRequest."""
    ignored = check_fields(body, _KNOWN, _IGNORED, _REFUSED)
    check_choices(body)
    if take(body, "top_logprobs", int, 0):
        raise BadRequest("top_logprobs is not offered: logprobs has the sampled tokens' own")
    form = take(body, "response_format", dict, {}).get("type", "text")
    if form != "text":
        raise BadRequest(f"response_format {form!r} is not offered: what is sampled is not constrained; allowed: text")
    options = take(body, "stream_options", dict, {})
    limit = take(body, "max_completion_tokens", int, take(body, "max_tokens", int))
    tools, without_effect = chosen_tools(body, [_tool(t) for t in take(body, "tools", list, [])])
    return Wanted(
        messages=[_message(m, i) for i, m in enumerate(take(body, "messages", list, []))],
        tools=tools,
        stream=take(body, "stream", bool, False),
        max_tokens=positive(limit, "max_tokens"),
        stop=stop_strings(body.get("stop")),
        temperature=take(body, "temperature", (int, float)),
        top_p=take(body, "top_p", (int, float)),
        logprobs=take(body, "logprobs", bool, False),
        include_usage=bool(options.get("include_usage")),
        model=take(body, "model", str, ""),
        ignored=ignored + without_effect,
    )


def check_choices(body: Mapping[str, Any]) -> None:
    """Raise BadRequest for more than one answer per request."""
    if take(body, "n", int, 1) != 1:
        raise BadRequest(f"n is {body['n']}; allowed: 1. Ask several times: each answer is a branch of its own")


def positive(value: int | None, name: str) -> int | None:
    """Raises BadRequest for 0 or less."""
    if value is not None and value < 1:
        raise BadRequest(f"{name} is {value}; allowed: an integer >= 1")
    return value


def chosen_tools(body: Mapping[str, Any], tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """(tools that the model is shown, what has no effect): the policy is not forced to call, or to call once."""
    choice = body.get("tool_choice")
    if choice in ("none", {"type": "none"}):
        return [], []
    without_effect = [] if choice in (None, "auto", {"type": "auto"}) else ["tool_choice"]
    if body.get("parallel_tool_calls") is False and tools:
        without_effect.append("parallel_tool_calls")
    return tools, without_effect


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise BadRequest(f"a tool of type {kind!r} is not offered; allowed: function")
    function = take(tool, "function", dict, {})
    return function_tool(function.get("name"), function.get("description"), function.get("parameters"))


def _message(message: Any, number: int) -> Message:
    if not isinstance(message, Mapping):
        raise BadRequest(f"messages[{number}] is {type(message).__name__}; allowed: an object")
    role = {"developer": "system", "function": "tool"}.get(str(message.get("role")), message.get("role"))
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequest(f"messages[{number}].role is {role!r}; allowed: system, developer, user, assistant, tool")
    made: Message = {"role": role, "content": text_of(message.get("content"), f"messages[{number}].content")}
    if role == "tool" and message.get("tool_call_id"):
        made["tool_call_id"] = str(message["tool_call_id"])
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str):
            made["reasoning_content"] = reasoning
        calls = [_sent_call(call, number) for call in take(message, "tool_calls", list, [])]
        if calls:
            made["tool_calls"] = calls
    return made


def _sent_call(call: Any, number: int) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise BadRequest(f"messages[{number}].tool_calls has {call!r:.80}; allowed: objects")
    function = take(call, "function", dict, {})
    return tool_call(call.get("id"), function.get("name"), function.get("arguments"))


def reply(wanted: Wanted, ident: str, answer: Answer) -> dict[str, Any]:
    """The whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_call(call) for call in answer.calls]
    else:
        message["content"] = answer.content
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": answer.log_probs, "refusal": None} if wanted.logprobs else None,
        "finish_reason": answer.finish,
    }
    return {**_envelope(wanted, ident, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


class Stream:
    """Chunks of one answer."""

    def __init__(self, wanted: Wanted, ident: str, prompt_tokens: int) -> None:
        self.wanted, self.ident = wanted, ident

    def begin(self) -> Iterator[bytes]:
        """The role."""
        yield self._chunk({"role": "assistant", "content": ""})

    def piece(self, reasoning: str, content: str) -> Iterator[bytes]:
        """New text."""
        if reasoning:
            yield self._chunk({"reasoning_content": reasoning})
        if content:
            yield self._chunk({"content": content})

    def end(self, answer: Answer) -> Iterator[bytes]:
        """Calls, finish reason, log-probs, usage."""
        for number, call in enumerate(answer.calls):
            made = _call(call)
            arguments = made["function"].pop("arguments")
            head = {"index": number, **made, "function": {**made["function"], "arguments": ""}}
            yield self._chunk({"tool_calls": [head]})
            yield self._chunk({"tool_calls": [{"index": number, "function": {"arguments": arguments}}]})
        yield self._chunk({}, answer.finish, answer.log_probs if self.wanted.logprobs else None)
        if self.wanted.include_usage:
            envelope = _envelope(self.wanted, self.ident, "chat.completion.chunk")
            yield event({**envelope, "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def failed(self, status: int, message: str) -> Iterator[bytes]:
        """An error after the status was sent."""
        yield event(error(status, message))

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, log_probs: Any = None) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": None if log_probs is None else {"content": log_probs, "refusal": None},
            "finish_reason": finish,
        }
        return event({**_envelope(self.wanted, self.ident, "chat.completion.chunk"), "choices": [choice]})


def error(status: int, message: str) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = _ERRORS.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": str(status)}}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": arguments_json(dict(call))}
    return {"id": call["id"], "type": "function", "function": function}


def _envelope(wanted: Wanted, ident: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{ident}", "object": kind, "created": int(time.time()), "model": wanted.model}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
