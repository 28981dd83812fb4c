"""OpenAI's `/v1/completions` and `/v1/chat/completions` over an `EmbeddedEngine`.

`server.create_app` mounts the router. A request becomes prompts (token ids) and SGLang sampling parameters; both
endpoints then share everything but the shape of a choice. Stream chunks hold the new text only, as OpenAI's do.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from slime_core.engines.embedded.fan_out import gather_outputs, merge_streams
from slime_core.engines.embedded.sampler import derive_seed
from slime_core.engines.embedded.wire import (
    BadRequest,
    check_keys,
    event,
    event_stream,
    json_response,
    read_json,
    take,
)
from slime_core.types import GenerationOutput

if TYPE_CHECKING:
    from slime_core.engines.embedded.engine import EmbeddedEngine

_SAMPLING = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "stop": "stop",
    "stop_token_ids": "stop_token_ids", "min_tokens": "min_new_tokens", "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens", "no_stop_trim": "no_stop_trim",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
}  # fmt: skip
_COMMON = frozenset(_SAMPLING) | {
    "model", "max_tokens", "seed", "n", "stream", "stream_options", "logprobs", "user", "rid", "metadata",
}  # fmt: skip
_COMPLETION = _COMMON | {"prompt"}
_CHAT = _COMMON | {
    "messages", "max_completion_tokens", "top_logprobs", "tools", "chat_template_kwargs", "store",
}  # fmt: skip


@dataclass
class _Job:
    """A parsed request."""

    chat: bool
    ident: str
    model: str
    prompts: list[list[int]]
    params: list[dict[str, Any]]
    """One per choice; choices of one prompt are adjacent."""
    rids: list[str | None]
    """One per choice."""
    copies: int
    top_logprobs: int | None
    """None: no log-probs wanted."""
    include_usage: bool
    created: int

    def prompt_of(self, choice: int) -> list[int]:
        """The prompt of a choice."""
        return self.prompts[choice // self.copies]

    def options(self, choice: int) -> dict[str, Any]:
        """Keyword arguments of the engine's calls."""
        return {"rid": self.rids[choice], "top_logprobs": self.top_logprobs or 0}


def openai_router(engine: EmbeddedEngine, model_name: str) -> APIRouter:
    """The routes."""
    router = APIRouter()

    async def run(request: Request, job: _Job, stream: bool) -> Response:
        if stream:
            return await event_stream(request, _events(engine, job), "openai")
        calls = [partial(engine.generate, job.prompt_of(i), p, **job.options(i)) for i, p in enumerate(job.params)]
        outputs = await gather_outputs(request, calls)
        choices = [_choice(engine, job, i, output) for i, output in enumerate(outputs)]
        kind = "chat.completion" if job.chat else "text_completion"
        return json_response(_envelope(job, kind, choices) | {"usage": _usage(job, outputs)})

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_json(request, _COMPLETION)
        prompts = _completion_prompts(engine, body.get("prompt"))
        wanted = body.get("logprobs")
        if wanted is not None and (type(wanted) is not int or wanted < 0):
            raise BadRequest(f"logprobs is {wanted!r}; allowed: an integer >= 0")
        limit = take(body, "max_tokens", int, 16)
        job = _job(engine, body, model_name, prompts, limit, wanted, chat=False)
        return await run(request, job, take(body, "stream", bool, False))

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_json(request, _CHAT)
        prompt = _chat_prompt(engine, body)
        wanted = take(body, "top_logprobs", int, 0) if take(body, "logprobs", bool, False) else None
        if wanted is None and body.get("top_logprobs"):
            raise BadRequest(f"top_logprobs is {body['top_logprobs']!r} without logprobs; add logprobs: true")
        context = (await engine.info())["max_context_length"]
        limit = take(body, "max_completion_tokens", int, take(body, "max_tokens", int, max(context - len(prompt), 1)))
        job = _job(engine, body, model_name, [prompt], limit, wanted, chat=True)
        return await run(request, job, take(body, "stream", bool, False))

    return router


def _job(
    engine: EmbeddedEngine,
    body: Mapping[str, Any],
    model_name: str,
    prompts: list[list[int]],
    limit: int,
    top_logprobs: int | None,
    *,
    chat: bool,
) -> _Job:
    if engine.tokenizer is None:
        raise BadRequest("the OpenAI API answers with text, and the model directory has no tokenizer; use /generate")
    copies = take(body, "n", int, 1)
    if copies < 1:
        raise BadRequest(f"n is {copies}; allowed: an integer >= 1")
    base = {ours: body[theirs] for theirs, ours in _SAMPLING.items() if body.get(theirs) is not None}
    base["max_new_tokens"] = limit
    seed = body.get("seed")
    if seed is not None and type(seed) is not int:
        raise BadRequest(f"seed is {seed!r}; allowed: an integer")
    params = []
    for choice in range(len(prompts) * copies):
        own = None if seed is None else (seed if choice == 0 else derive_seed(seed, choice))
        params.append(base | {"sampling_seed": own})
    rid = take(body, "rid", str, "") or None
    several = rid is not None and len(params) > 1
    options = take(body, "stream_options", dict, {})
    check_keys(options, {"include_usage"})
    return _Job(
        chat=chat,
        ident=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        model=take(body, "model", str, model_name),
        prompts=prompts,
        params=params,
        rids=[f"{rid}_{choice}" if several else rid for choice in range(len(params))],
        copies=copies,
        top_logprobs=top_logprobs,
        include_usage=bool(options.get("include_usage")),
        created=int(time.time()),
    )


def _completion_prompts(engine: EmbeddedEngine, prompt: Any) -> list[list[int]]:
    """A string, strings, ids, or lists of ids."""
    items = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    out = []
    for item in items:
        if isinstance(item, str):
            if engine.tokenizer is None:
                raise BadRequest("a text prompt needs a tokenizer, and the model directory has none")
            out.append(engine.tokenizer.encode(item))
        elif isinstance(item, list):
            out.append(item)
        else:
            raise BadRequest("prompt must be a string, a list of strings, token ids, or a list of lists of token ids")
    return out


def _chat_prompt(engine: EmbeddedEngine, body: Mapping[str, Any]) -> list[int]:
    messages = take(body, "messages", list, [])
    if not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise BadRequest("messages must be a non-empty list of objects with role and content")
    tokenizer = engine.tokenizer
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise BadRequest("chat needs a tokenizer with a chat template; use /v1/completions or /generate")
    import jinja2

    try:
        ids = tokenizer.apply_chat_template(
            messages,
            tools=body.get("tools"),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **take(body, "chat_template_kwargs", dict, {}),
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise BadRequest(f"the chat template does not accept these messages: {error}") from error
    return list(ids)


def _envelope(job: _Job, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": job.ident, "object": kind, "created": job.created, "model": job.model, "choices": choices}


def _usage(job: _Job, outputs: list[GenerationOutput]) -> dict[str, Any]:
    prompt, completion = sum(map(len, job.prompts)), sum(len(o.token_ids) for o in outputs)
    cached = sum(o.meta_info["cached_tokens"] for o in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _choice(engine: EmbeddedEngine, job: _Job, index: int, output: GenerationOutput) -> dict[str, Any]:
    reason = (output.meta_info["finish_reason"] or {}).get("type")
    log_probs = None if job.top_logprobs is None else _log_probs(engine, job, output, 0)
    content = {"message": {"role": "assistant", "content": output.text}} if job.chat else {"text": output.text}
    return {"index": index, **content, "logprobs": log_probs, "finish_reason": reason}


def _log_probs(engine: EmbeddedEngine, job: _Job, output: GenerationOutput, start: int) -> dict[str, Any]:
    """OpenAI's log-prob object for the tokens from `start` on."""
    tokens = [engine.tokenizer.decode([t]) for t in output.token_ids[start:]]
    values = output.log_probs[start:]
    tops = output.meta_info.get("output_top_logprobs") or [[]] * len(output.token_ids)
    named = [[(engine.tokenizer.decode([t]), p) for p, t in row] for row in tops[start:]]
    if job.chat:
        return {
            "content": [
                {
                    "token": token,
                    "logprob": value,
                    "bytes": list(token.encode()),
                    "top_logprobs": [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in row],
                }
                for token, value, row in zip(tokens, values, named)
            ]
        }
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": [dict(row) for row in named] if job.top_logprobs else None,
        "text_offset": offsets,
    }


async def _events(engine: EmbeddedEngine, job: _Job) -> AsyncIterator[bytes]:
    """Chunks of all choices as they come."""
    streams = [engine.stream(job.prompt_of(i), p, **job.options(i)) for i, p in enumerate(job.params)]
    sent_text, sent_tokens = [0] * len(streams), [0] * len(streams)
    last: dict[int, GenerationOutput] = {}
    kind = "chat.completion.chunk" if job.chat else "text_completion"
    async with aclosing(merge_streams(streams)) as outputs:
        async for choice, output in outputs:
            first, last[choice] = choice not in last, output
            text = output.text[sent_text[choice] :]
            reason = (output.meta_info["finish_reason"] or {}).get("type")
            log_probs = None if job.top_logprobs is None else _log_probs(engine, job, output, sent_tokens[choice])
            sent_text[choice], sent_tokens[choice] = max(sent_text[choice], len(output.text)), len(output.token_ids)
            role = {"role": "assistant"} if first else {}
            content = {"delta": {**role, "content": text}} if job.chat else {"text": text}
            yield event(
                _envelope(job, kind, [{"index": choice, **content, "logprobs": log_probs, "finish_reason": reason}])
            )
    if job.include_usage:
        yield event(_envelope(job, kind, []) | {"usage": _usage(job, list(last.values()))})
