"""SGLang's `POST /generate` with an `EmbeddedEngine`: single and batch, streaming, log-probs.

`native.create_app` adds the route. Stream chunks are cumulative, as in SGLang: each holds the text and ids so far.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import orjson
from fastapi import FastAPI, Request, Response
from pydantic import BeforeValidator, Field, WithJsonSchema
from slime_embedded.engine.sampler import derive_seed

from slime_core.data.tokenizer import encode_text
from slime_core.errors import EngineError
from slime_core.sample import GenerationOutput
from slime_serving.http.bodies import MOST_ANSWERS, MOST_IDS, NOTHING, Body, check_text
from slime_serving.http.errors import BadRequest, sglang_shape, shown
from slime_serving.http.streams import (
    DONE,
    event,
    event_stream,
    gather,
    json_response,
    merge,
    unless_disconnected,
)
from slime_serving.http.threads import DeadlineThreads

if TYPE_CHECKING:
    from slime_embedded.engine.engine import EmbeddedEngine


def _texts(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("text must be a string or a list of strings")
    return value


def _ids(value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise ValueError("input_ids must be a list of token ids, or a list of such lists")
    rows = value if isinstance(value[0], list) else [value]
    if len(rows) > MOST_ANSWERS:
        raise ValueError(f"input_ids has {len(rows)} lists; allowed: {MOST_ANSWERS}")
    if not all(isinstance(row, list) for row in rows):
        raise ValueError("input_ids mixes token ids and lists of token ids")
    for row in rows:
        if not set(map(type, row)) <= {int}:
            other = next(token for token in row if type(token) is not int)
            raise ValueError(f"input_ids has {shown(other)}; allowed: token ids, or lists of them")
    return value


def _small(value: Any) -> Any:
    """Validate sampling parameters: they may not hold long lists."""
    for params in value if isinstance(value, list) else [value]:
        for name, given in params.items() if isinstance(params, dict) else ():
            if isinstance(given, list | dict) and len(given) > MOST_ANSWERS:
                raise ValueError(f"sampling_params: {shown(name)} has {len(given)} entries; allowed: {MOST_ANSWERS}")
    return value


class GenerateBody(Body):
    """The body of `/generate`; a list of a per-prompt field has as many entries as there are prompts."""

    text: Annotated[Any, BeforeValidator(_texts), WithJsonSchema({"type": ["string", "array"]})] = None
    input_ids: Annotated[Any, BeforeValidator(_ids), WithJsonSchema({"type": "array"})] = None
    sampling_params: Annotated[
        dict[str, Any] | list[dict[str, Any] | None], BeforeValidator(_small), Field(default_factory=dict)
    ]
    rid: str | list[str | None] | None = None
    return_logprob: bool | list[bool | None] = False
    logprob_start_len: int | list[int | None] = -1
    top_logprobs_num: int | list[int | None] = 0
    return_text_in_logprobs: bool = False
    return_routed_experts: bool | list[bool | None] = False
    lora_path: str | list[str | None] | None = None
    routed_experts_start_len: int = 0
    stream: bool = False

    most_values = 2 * MOST_IDS
    most_entries = {"input_ids": MOST_IDS, "text": MOST_ANSWERS}
    no_effect = frozenset({
        "model", "session_id", "log_metrics", "no_logs", "priority", "extra_key", "conversation_id", "custom_labels",
        "routing_key", "external_trace_header", "cache_salt", "received_time", "routed_dp_rank", "data_parallel_rank",
    })  # fmt: skip
    only = dict.fromkeys((
        "image_data", "video_data", "audio_data", "modalities", "token_ids_logprob", "return_hidden_states",
        "return_bytes", "return_entropy", "background", "session_params", "lora_id", "input_embeds",
        "custom_logit_processor", "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key",
        "return_sampling_mask", "return_indexer_topk", "require_reasoning", "use_audio_in_video", "watermark",
        "return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64",
    ), NOTHING)  # fmt: skip


@dataclass
class _Item:
    """A prompt of a request, with its settings."""

    ids: list[int]
    params: dict[str, Any]
    rid: str | None
    return_logprob: bool
    logprob_start: int | None
    top_logprobs: int
    with_text: bool
    routed: bool = False
    routed_start: int = 0
    """First token whose experts are requested."""
    adapter: str | None = None
    """Name of `--lora-adapters`, SGLang's `lora_path`."""

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the engine's calls."""
        return {
            "rid": self.rid,
            "logprob_start": self.logprob_start,
            "top_logprobs": self.top_logprobs,
            "return_routed_experts": self.routed,
            "adapter": self.adapter,
        }


def add_generate(app: FastAPI, engine: EmbeddedEngine) -> None:
    """Add the route."""
    threads = DeadlineThreads()

    async def generate(request: Request, body: GenerateBody) -> Response:
        prompts, single = await _prompts(engine, body, threads)
        items = _items(body, prompts)
        single = single and len(items) == 1
        if body.stream:
            return await event_stream(request, _stream(engine, items, single))
        answers = await unless_disconnected(request, gather([partial(_answered, engine, item) for item in items]))
        return json_response(answers[0] if single else answers)

    for method in ("POST", "PUT"):
        app.add_api_route("/generate", generate, methods=[method], operation_id=f"generate_{method.lower()}")


async def _answered(engine: EmbeddedEngine, item: _Item) -> orjson.Fragment:
    """Return the answer as JSON: a large one is encoded in pieces, and no longer held as objects for the collector."""
    output = await engine.generate(item.ids, item.params, **item.options())
    return orjson.Fragment(orjson.dumps(answer(engine, item, output)))


async def _stream(engine: EmbeddedEngine, items: list[_Item], single: bool) -> AsyncIterator[bytes]:
    """Yield events of all items as they arrive; batch items carry their `index`."""
    streams = [engine.stream(item.ids, item.params, **item.options()) for item in items]
    begun = False
    try:
        async with aclosing(merge(streams)) as outputs:
            async for index, output in outputs:
                chunk = answer(engine, items[index], output)
                yield event(chunk if single else {"index": index, **chunk})
                begun = True
    except EngineError as error:
        if not begun:
            raise
        yield event(sglang_shape(400, str(error)))
    yield DONE


def answer(engine: EmbeddedEngine, item: _Item, output: GenerationOutput) -> dict[str, Any]:
    """Return SGLang's response object."""

    def entry(log_prob: float | None, token: int) -> list[Any]:
        return [log_prob, token, _text(engine.tokenizer, token) if item.with_text and engine.tokenizer else None]

    meta = dict(output.meta_info)
    tops = {side: meta.pop(f"{side}_top_logprobs", None) for side in ("input", "output")}
    scored = meta.pop("input_token_logprobs", None)
    if "routed_experts" in meta:  # base64 of int32, as SGLang sends it
        routed = np.asarray(meta["routed_experts"])[item.routed_start :].tobytes()
        meta |= {"routed_experts": b64encode(routed).decode(), "routed_experts_start_len": item.routed_start}
    if item.return_logprob:
        meta["output_token_logprobs"] = [entry(p, t) for p, t in zip(output.log_probs, output.token_ids)]
        meta["input_token_logprobs"] = [entry(p, t) for p, t in scored or []]
        for side, top in tops.items():
            if top is not None:
                named = [None if tokens is None else [entry(p, t) for p, t in tokens] for tokens in top]
                meta[f"{side}_top_logprobs"] = named
    return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}


@lru_cache(maxsize=1 << 16)
def _text(tokenizer: Any, token: int) -> str:
    return str(tokenizer.decode([token]))


def _items(body: GenerateBody, prompts: list[list[int]]) -> list[_Item]:
    size = len(prompts)

    def spread(key: str, default: Any) -> list[Any]:
        value = getattr(body, key)
        values = value if isinstance(value, list) else [value] * size
        if len(values) != size:
            raise BadRequest(f"{key} has {len(values)} entries for {size} prompts")
        return [default if item is None else item for item in values]

    if size > 1 and isinstance(body.rid, str):
        raise BadRequest(f"rid is a string, but the request has {size} prompts; give a list of {size} ids")
    rids, flags, params = spread("rid", None), spread("return_logprob", False), spread("sampling_params", {})
    starts, tops = spread("logprob_start_len", -1), spread("top_logprobs_num", 0)
    routed, routed_start = spread("return_routed_experts", False), body.routed_experts_start_len
    adapters = spread("lora_path", None)
    if not 0 <= routed_start <= min(map(len, prompts), default=0):
        raise BadRequest(f"routed_experts_start_len is {routed_start}; allowed: 0 to the length of the prompt")
    items: list[_Item] = []
    for i, ids in enumerate(prompts):
        copies = 1 if params[i].get("n") is None else params[i]["n"]
        if type(copies) is not int or not 1 <= copies <= MOST_ANSWERS:
            raise BadRequest(f"sampling_params: n is {shown(copies)}; allowed: an integer >= 1, up to {MOST_ANSWERS}")
        start = None if not flags[i] else (max(len(ids) - 1, 0) if starts[i] == -1 else starts[i])
        for k in range(copies):
            chosen = {key: value for key, value in params[i].items() if key != "n"}
            if k and isinstance(chosen.get("sampling_seed"), int):
                chosen["sampling_seed"] = derive_seed(chosen["sampling_seed"], k)
            rid = rids[i] if copies == 1 or rids[i] is None else f"{rids[i]}_{k}"
            top = tops[i] if flags[i] else 0
            with_text = body.return_text_in_logprobs
            which = (with_text, routed[i], routed_start, adapters[i])
            items.append(_Item(ids, chosen, rid, flags[i], start, top, *which))
    if len(items) > MOST_ANSWERS:
        raise BadRequest(f"the request asks for {len(items)} answers; allowed: {MOST_ANSWERS}")
    return items


async def _prompts(
    engine: EmbeddedEngine, body: GenerateBody, threads: DeadlineThreads
) -> tuple[list[list[int]], bool]:
    """Return the prompts' ids, and whether the request has a single prompt outside a list."""
    if (body.text is None) == (body.input_ids is None):
        raise BadRequest("give either text or input_ids")
    context = (await engine.info())["max_context_length"]
    if body.text is None:
        rows = body.input_ids if isinstance(body.input_ids[0], list) else [body.input_ids]
        if (longest := max(map(len, rows))) > context:
            raise BadRequest(f"input_ids has {longest} ids in a prompt; allowed: {context}, the context")
        return (body.input_ids, False) if isinstance(body.input_ids[0], list) else ([body.input_ids], True)
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise BadRequest("text needs a tokenizer, and the model directory has none; give input_ids")
    texts = [body.text] if isinstance(body.text, str) else body.text
    for text in texts:
        check_text(len(text), context, "text")
    ids = await threads.call("tokenising the text", lambda: [encode_text(tokenizer, text) for text in texts])
    return ids, isinstance(body.text, str)
