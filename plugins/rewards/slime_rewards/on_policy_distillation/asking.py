"""Requests to a teacher on a server, and its answers: log-probs of given tokens and of the likeliest in their places.

.../generate           SGLang, `slime serve`    return_logprob, top_logprobs_num; an adapter is `lora_path`
.../v1/completions     vLLM                     prompt_logprobs; an adapter is `model`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from slime_core import Source
from slime_core.errors import PluginError
from slime_core.sample import Sample

Likeliest = list[tuple[float, int]]
COMPLETIONS = "/completions"


class Said(NamedTuple):
    """The teacher's answer about a response."""

    log_probs: list[float]
    """[response_length]; 0.0 where the policy did not sample."""
    top: list[Likeliest | None]
    """[response_length] likeliest tokens; None where the policy did not sample."""


def request(
    url: str, tokens: Sequence[int], length: int, *, temperature: float, number: int, adapter: str | None
) -> dict[str, Any]:
    """Return a body that asks for log-probs of the last `length` tokens, and of `number` likeliest in their places."""
    if url.endswith(COMPLETIONS):
        body = {"prompt": list(tokens), "max_tokens": 1, "temperature": temperature, "prompt_logprobs": number}
        return body | ({"model": adapter} if adapter else {})
    params = {"temperature": temperature, "max_new_tokens": 0, "skip_special_tokens": False}
    body = {"input_ids": list(tokens), "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    if number:  # many numbers per token, so none of the prompt's
        body |= {"top_logprobs_num": number, "logprob_start_len": len(tokens) - length - 1}
    return body | ({"lora_path": adapter} if adapter else {})


def said(answer: Mapping[str, Any], sample: Sample, number: int = 0) -> Said:
    """Read the answer: 0.0 and None where the policy did not sample (tools' answers, template).

    Raises:
        PluginError: The answer does not score the response's tokens.
    """
    read = _of_completions if "choices" in answer else _of_generate
    log_probs, top = read(answer, sample)
    sampled = _sampled(sample)
    if number:
        short = [t for t, row, was in zip(sample.response_tokens, top, sampled) if was and not row]
        if short or len(top) != len(sampled):
            raise PluginError(
                f"the teacher's answer has no likeliest tokens for {number} asked; does the server return them?"
            )
    try:
        kept = [float(p) if was else 0.0 for p, was in zip(log_probs, sampled, strict=True)]  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise PluginError(f"the teacher's answer has no log-prob of a sampled token: {error!r}") from error
    rows = top if number else [None] * len(sampled)
    return Said(kept, [row if was else None for row, was in zip(rows, sampled)])


_Read = tuple[list[float | None], list[Likeliest | None]]


def _of_generate(answer: Mapping[str, Any], sample: Sample) -> _Read:
    """Read SGLang's entries [log-prob, token, text], of which the first token's log-prob is null."""
    length = sample.response_length
    try:
        entries = answer["meta_info"]["input_token_logprobs"][1:][-length:]
        tokens = [int(entry[1]) for entry in entries]
        top = (answer["meta_info"].get("input_top_logprobs") or [])[1:][-length:]
        rows = [row and [(float(entry[0]), int(entry[1])) for entry in row] for row in top]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PluginError(f"the teacher's answer has no usable meta_info.input_token_logprobs: {error!r}") from error
    if tokens != sample.response_tokens:
        raise PluginError(
            f"the teacher scored {len(tokens)} tokens {tokens[:8]}..., not the {length} of the response"
            f" {sample.response_tokens[:8]}...; teacher and actor must share a tokenizer"
        )
    return [entry[0] for entry in entries], rows


def _of_completions(answer: Mapping[str, Any], sample: Sample) -> _Read:
    """Read vLLM's mappings {token: {logprob, ...}}, which hold the prompt's own token and the likeliest ones."""
    try:
        rows = answer["choices"][0]["prompt_logprobs"][-sample.response_length :]
        pairs = [[(float(found["logprob"]), int(token)) for token, found in row.items()] for row in rows]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise PluginError(f"the teacher's answer has no usable choices[0].prompt_logprobs: {error!r}") from error
    own = [{token: p for p, token in row} for row in pairs]
    if len(own) != sample.response_length or any(t not in row for t, row in zip(sample.response_tokens, own)):
        raise PluginError(
            f"the teacher scored other tokens than the {sample.response_length} of the response; teacher and actor must"
            " share a tokenizer"
        )
    return [row[t] for t, row in zip(sample.response_tokens, own)], [sorted(row, reverse=True) for row in pairs]


def _sampled(sample: Sample) -> list[bool]:
    """Return whether the policy sampled each token of the response."""
    spans = sample.known_spans()
    return [span.source == Source.SAMPLED for span in spans for _ in range(span.length)][-sample.response_length :]
