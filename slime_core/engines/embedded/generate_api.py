"""SGLang's `POST /generate` over an `EmbeddedEngine`: single and batch, streaming, log-probs.

`server.create_app` mounts the router. Stream chunks are cumulative, as SGLang's: each holds the text and ids so far.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from slime_core.engines.embedded.fan_out import gather_outputs, merge_streams
from slime_core.engines.embedded.sampler import derive_seed
from slime_core.engines.embedded.wire import (
    BadRequest,
    event,
    event_stream,
    json_response,
    read_json,
    take,
)
from slime_core.types import GenerationOutput

if TYPE_CHECKING:
    from slime_core.engines.embedded.engine import EmbeddedEngine

_FIELDS = frozenset({
    "text", "input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "return_text_in_logprobs", "stream", "session_id", "return_routed_experts", "routed_experts_start_len",
})  # fmt: skip


@dataclass
class _Item:
    """One prompt of a request."""

    ids: list[int]
    params: dict[str, Any]
    rid: str | None
    return_logprob: bool
    logprob_start: int | None
    top_logprobs: int
    with_text: bool
    routed: bool = False
    routed_start: int = 0
    """First token whose experts are wanted."""

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the engine's calls."""
        return {
            "rid": self.rid,
            "logprob_start": self.logprob_start,
            "top_logprobs": self.top_logprobs,
            "return_routed_experts": self.routed,
        }


def generate_router(engine: EmbeddedEngine) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.api_route("/generate", methods=["POST", "PUT"])
    async def generate(request: Request) -> Response:
        body = await read_json(request, _FIELDS)
        items, single = _items(engine, body)
        if take(body, "stream", bool, False):
            return await event_stream(request, _stream(engine, items, single))
        calls = [partial(engine.generate, item.ids, item.params, **item.options()) for item in items]
        outputs = await gather_outputs(request, calls)
        answers = [answer(engine, item, output) for item, output in zip(items, outputs)]
        return json_response(answers[0] if single else answers)

    return router


async def _stream(engine: EmbeddedEngine, items: list[_Item], single: bool) -> AsyncIterator[bytes]:
    """Events of all items as they come; batch items carry their `index`."""
    streams = [engine.stream(item.ids, item.params, **item.options()) for item in items]
    async with aclosing(merge_streams(streams)) as outputs:
        async for index, output in outputs:
            chunk = answer(engine, items[index], output)
            yield event(chunk if single else {"index": index, **chunk})


def answer(engine: EmbeddedEngine, item: _Item, output: GenerationOutput) -> dict[str, Any]:
    """SGLang's answer object."""

    def entry(log_prob: float | None, token: int) -> list[Any]:
        return [log_prob, token, engine.tokenizer.decode([token]) if item.with_text and engine.tokenizer else None]

    meta = dict(output.meta_info)
    top = meta.pop("output_top_logprobs", None)
    scored = meta.pop("input_token_logprobs", None)
    if "routed_experts" in meta:  # base64 of int32, as SGLang sends it
        routed = meta["routed_experts"].from_row(item.routed_start)
        meta |= {"routed_experts": routed.to_json()["base64"], "routed_experts_start_len": item.routed_start}
    if item.return_logprob:
        meta["output_token_logprobs"] = [entry(p, t) for p, t in zip(output.log_probs, output.token_ids)]
        meta["input_token_logprobs"] = [entry(p, t) for p, t in scored or []]
        if top is not None:
            meta["output_top_logprobs"] = [[entry(p, t) for p, t in tokens] for tokens in top]
    return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}


def _items(engine: EmbeddedEngine, body: dict[str, Any]) -> tuple[list[_Item], bool]:
    prompts, single = _prompts(engine, body)
    size = len(prompts)
    params = _spread(body, "sampling_params", size, dict, {})
    rids = _spread(body, "rid", size, str, None)
    if size > 1 and isinstance(body.get("rid"), str):
        raise BadRequest(f"rid is a string, but the request has {size} prompts; give a list of {size} ids")
    flags = _spread(body, "return_logprob", size, bool, False)
    starts = _spread(body, "logprob_start_len", size, int, -1)
    tops = _spread(body, "top_logprobs_num", size, int, 0)
    with_text = take(body, "return_text_in_logprobs", bool, False)
    routed = _spread(body, "return_routed_experts", size, bool, False)
    routed_start = take(body, "routed_experts_start_len", int, 0)
    if not 0 <= routed_start <= min(map(len, prompts), default=0):
        raise BadRequest(f"routed_experts_start_len is {routed_start}; allowed: 0 to the length of the prompt")
    items: list[_Item] = []
    for i, ids in enumerate(prompts):
        copies = 1 if params[i].get("n") is None else params[i]["n"]
        if type(copies) is not int or copies < 1:
            raise BadRequest(f"sampling_params: n is {copies!r}; allowed: an integer >= 1")
        start = None if not flags[i] else (max(len(ids) - 1, 0) if starts[i] == -1 else starts[i])
        for k in range(copies):
            chosen = {key: value for key, value in params[i].items() if key != "n"}
            if k and isinstance(chosen.get("sampling_seed"), int):
                chosen["sampling_seed"] = derive_seed(chosen["sampling_seed"], k)
            rid = rids[i] if copies == 1 or rids[i] is None else f"{rids[i]}_{k}"
            top = tops[i] if flags[i] else 0
            items.append(_Item(ids, chosen, rid, flags[i], start, top, with_text, routed[i], routed_start))
    return items, single and len(items) == 1


def _prompts(engine: EmbeddedEngine, body: dict[str, Any]) -> tuple[list[list[int]], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise BadRequest("give either text or input_ids")
    if text is not None:
        if engine.tokenizer is None:
            raise BadRequest("text needs a tokenizer, and the model directory has none; give input_ids")
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            raise BadRequest("text must be a string or a list of strings")
        return [engine.tokenizer.encode(t) for t in texts], isinstance(text, str)
    if not isinstance(ids, list) or not ids:
        raise BadRequest("input_ids must be a list of token ids, or a list of such lists")
    if isinstance(ids[0], list):
        if not all(isinstance(item, list) for item in ids):
            raise BadRequest("input_ids mixes token ids and lists of token ids")
        return ids, False
    return [ids], True


def _spread(body: dict[str, Any], key: str, size: int, kind: type, default: Any) -> list[Any]:
    """One value per prompt: a list is taken as it is, a single value is repeated."""
    value = body.get(key)
    values = value if isinstance(value, list) else [value] * size
    if len(values) != size:
        raise BadRequest(f"{key} has {len(values)} entries for {size} prompts")
    values = [default if item is None else item for item in values]
    for item in values:
        if item is not default and (not isinstance(item, kind) or (isinstance(item, bool) and kind is not bool)):
            raise BadRequest(f"{key} is {item!r}; allowed: {kind.__name__}, or a list of them")
    return values
