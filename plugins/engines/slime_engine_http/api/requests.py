"""A request for tokens, checked before it is sent.

`client` builds every /generate request here. SGLang 0.5.20 checks values but hardly any types, so a token id beyond the
vocabulary or a wrong type ends the *server*. Retried on other servers, such a request would end them one after another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from slime_core.errors import EngineError, did_you_mean


def _is_number(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def _is_strings(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value))


def _is_bias(value: Any) -> bool:
    return isinstance(value, Mapping) and all(str(k).isdecimal() and _is_number(v) for k, v in value.items())


_INTEGER = (lambda value: type(value) is int, "an integer")  # a bool is not accepted, although it is an int
_NUMBER = (_is_number, "a number")
_FLAG = (lambda value: isinstance(value, bool), "true or false")
_TEXT, _TEXTS = (lambda value: isinstance(value, str), "a string"), (_is_strings, "a string or a list of strings")

PARAMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "top_k", "beam_width"), _INTEGER),
    **dict.fromkeys(("stream_interval", "sampling_seed"), _INTEGER),
    "n": (lambda value: type(value) is int and value == 1, "1; a request has one answer"),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _NUMBER),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), _NUMBER),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"), _FLAG),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), _TEXT),
    **dict.fromkeys(("stop", "stop_regex"), _TEXTS),
    "custom_params": (lambda value: isinstance(value, Mapping), "a mapping"),
    "logit_bias": (_is_bias, "a mapping of token ids to numbers"),
    "stop_token_ids": (
        lambda value: isinstance(value, list | tuple) and all(type(v) is int for v in value), "a list of token ids"
    ),
}  # fmt: skip
"""SGLang's `SamplingParams` -> what is allowed; None, for the default, always is."""


_NESTED = ("thinker_config", "llm_config", "language_config", "text_config")


def generate_request(
    input_ids: Sequence[int],
    params: Mapping[str, Any],
    rid: str,
    *,
    vocab_size: int | None = None,
    routed_experts: bool = False,
    sampling_mask: bool = False,
    image_data: Sequence[str] = (),
    image_token: int | None = None,
) -> dict[str, Any]:
    """Return the body of /generate.

    Args:
        input_ids: [n] prompt.
        params: SGLang's `sampling_params`.
        rid: The request's name.
        vocab_size: Upper bound of token ids (exclusive); None if unknown.
        routed_experts: Ask for the experts of every token.
        sampling_mask: Ask for the candidates of every sampled token, if the parameters cut any. SGLang returns them
            for a finite top_k only, so a request without top_k, such as an evaluation's, gets none.
        image_data: `data:` URLs of the images whose tokens the prompt holds.
        image_token: The token that an image is expanded to; None if unknown, then the ids are sent unchanged.

    Raises:
        EngineError: The request would crash a server, or a server would reject it with a bare status 500.
    """
    ids = list(input_ids)
    if not ids:
        raise EngineError("input_ids is empty; a prompt has at least one token")
    # The JSON text shows signs, fractions, booleans and nesting at a fraction of a loop's cost.
    try:
        written = orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        written = b""
    if written.translate(None, b"0123456789,") != b"[]":
        raise EngineError("input_ids must be integers >= 0")
    if vocab_size is not None and (largest := max(ids)) >= vocab_size:
        raise EngineError(f"input_ids: {largest} is beyond the vocabulary of {vocab_size} tokens")
    for key, value in params.items():
        known = PARAMS.get(key)
        if known is None:
            hint = did_you_mean(str(key), PARAMS, form="{!r}", most=3) or f" Known: {', '.join(sorted(PARAMS))}."
            raise EngineError(f"sampling_params: unknown key {key!r}.{hint}")
        if value is not None and not known[0](value):
            raise EngineError(f"sampling_params: {key} is {value!r}; allowed: {known[1]}")
    stops = params.get("stop_token_ids")
    if stops and vocab_size is not None and not 0 <= min(stops) <= max(stops) < vocab_size:
        raise EngineError(f"sampling_params: stop_token_ids beyond the vocabulary of {vocab_size} tokens")
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": dict(params), "rid": rid, "return_logprob": True}
    if routed_experts:
        body["return_routed_experts"] = True
    if sampling_mask and cuts(params) and params.get("top_k") not in (None, -1):
        body["return_sampling_mask"] = True
    if image_data:
        body |= _with_images(ids, image_data, image_token)
    return body


def cuts(params: Mapping[str, Any]) -> bool:
    """Return whether tokens are sampled from a part of the vocabulary."""
    top_p, top_k, min_p = (params.get(name) for name in ("top_p", "top_k", "min_p"))
    return params.get("temperature") != 0 and (top_p not in (None, 1) or top_k not in (None, -1) or bool(min_p))


def _with_images(ids: list[int], image_data: Sequence[str], image_token: int | None) -> dict[str, Any]:
    wrong = next((i for i in image_data if not (isinstance(i, str) and i.startswith("data:image/"))), None)
    if wrong is not None:  # a server would read it as a local file, or fetch it from the web
        raise EngineError(f"image_data: {str(wrong)[:80]!r} is no data:image/... URL; Sample.image_data makes them")
    sent = ids if image_token is None else _one_each(ids, image_token, len(image_data))
    return {"input_ids": sent, "image_data": list(image_data)}


def _one_each(ids: Sequence[int], image_token: int, images: int) -> list[int]:
    """Return `ids` with one token for each image, which SGLang replaces by the image's tokens.

    If it gets all tokens, SGLang decodes the prompt and tokenizes the text, perhaps to other ids, or does not answer.
    """
    found = [token for i, token in enumerate(ids) if token != image_token or i == 0 or ids[i - 1] != image_token]
    if (runs := found.count(image_token)) != images:
        raise EngineError(
            f"input_ids: {runs} runs of the image token {image_token}, and {images} images; there must be one for each,"
            " with another token between two of them"
        )
    return found


def check_prompt(asked: int, meta_info: Mapping[str, Any]) -> None:
    """Raise EngineError where a server made another number of tokens of the prompt's images than slime did.

    Args:
        asked: Tokens of the prompt that the trainer sees.
        meta_info: Of the answer.
    """
    read = meta_info.get("prompt_tokens")
    if read is not None and read != asked:
        raise EngineError(
            f"the server read a prompt with images as {read} tokens, and slime as {asked}: their image processors"
            " resize otherwise; compare preprocessor_config.json with SGLang's --sglang-mm-process-config"
        )


def vocab_size_of(checkpoint: str | None) -> int | None:
    """Return `vocab_size` of the language model in a HF checkpoint's config.json; None if it is missing.

    It is missing for a name on the hub. Multimodal models nest it, under different names.
    """
    try:
        config = json.loads((Path(checkpoint or "") / "config.json").read_text(encoding="utf-8"))
        places = [config]
        for name in _NESTED:  # the inner value is right if both are given
            places += [place[name] for place in places if isinstance(place.get(name), dict)]
        sizes = [place["vocab_size"] for place in places if place.get("vocab_size")]
        return int(sizes[-1]) if sizes else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None
