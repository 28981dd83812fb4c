"""An answer that a weight update interrupted -> the request for its rest, and both pieces as one answer.

SGLang until 0.5.20 has no pause that keeps requests and allows flushing the cache, so updates end requests ("abort").
The client then requests the rest, with the tokens so far appended to the prompt. The result equals that of SGLang's own
"retract" (each token under the weights that sampled it) if only tokens carry over. A grammar, a penalty or a stop
string would restart with the second piece, so a request with one of them is repeated as a whole.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from slime_core.sample import GenerationOutput
from slime_engine_http.api.answers import MASK

_CARRIES = frozenset({
    "json_schema", "regex", "ebnf", "structural_tag", "stop", "stop_regex", "custom_params",
    "frequency_penalty", "presence_penalty", "beam_width",
})  # fmt: skip
"""Parameters that make a token depend on earlier tokens of the answer other than through the model."""
_ADDED = (
    "completion_tokens", "spec_verify_ct", "spec_accept_token_num", "spec_draft_token_num",
    "spec_num_correct_drafts", "spec_num_proposed_drafts", "e2e_latency",
)  # fmt: skip
_CUT = "length"
"""Finish reason of an answer that reached `max_new_tokens`, and the key of its number of tokens."""
_OF_THE_FIRST = ("id", "prompt_tokens", "cached_tokens")


def rest_of(body: Mapping[str, Any], output: GenerationOutput) -> dict[str, Any] | None:
    """Return the request for the rest of `output`, an answer to `body`; None if `body` must be repeated as a whole."""
    params = body["sampling_params"]
    limit, count = params.get("max_new_tokens"), len(output.token_ids)
    if limit is None or limit <= count or params.get("n") not in (None, 1):
        return None
    if any(params.get(name) for name in _CARRIES) or params.get("repetition_penalty") not in (None, 1, 1.0):
        return None
    left = {name: max(params[name] - count, 0) for name in ("max_new_tokens", "min_new_tokens") if params.get(name)}
    return {**body, "input_ids": [*body["input_ids"], *output.token_ids], "sampling_params": {**params, **left}}


def joined(first: GenerationOutput, rest: GenerationOutput) -> GenerationOutput:
    """Join both pieces into one answer to the first request; the finish reason is that of the last piece."""
    one, two = first.meta_info, rest.meta_info
    meta = {**two, **{name: one[name] for name in _OF_THE_FIRST if name in one}}
    meta |= {name: one.get(name, 0) + two.get(name, 0) for name in _ADDED if name in one or name in two}
    meta.pop("weight_versions", None)  # its spans count from the second piece's first token
    if "token_weight_versions" in one or "token_weight_versions" in two:
        meta["token_weight_versions"] = [
            *one.get("token_weight_versions", [0] * len(first.token_ids)),
            *two.get("token_weight_versions", [0] * len(rest.token_ids)),
        ]
    if one.get("routed_experts") and two.get("routed_experts"):
        meta["routed_experts"] = _experts(one["routed_experts"], two["routed_experts"])
    if MASK in one or MASK in two:
        meta[MASK] = [*one.get(MASK, ()), *two.get(MASK, ())]
    reason = meta.get("finish_reason")
    if isinstance(reason, Mapping) and reason.get("type") == _CUT and _CUT in reason:
        meta["finish_reason"] = {**reason, _CUT: len(first.token_ids) + int(reason[_CUT])}
    return GenerationOutput(
        [*first.token_ids, *rest.token_ids], [*first.log_probs, *rest.log_probs], first.text + rest.text, meta
    )


def _experts(one: str, two: str) -> str:
    """Join routed experts: the first piece's entries for its tokens, then the second piece's for the rest.

    The second piece covers the first piece's tokens too, but as the new weights route them.
    """
    known = base64.b64decode(one)
    return base64.b64encode(known + base64.b64decode(two)[len(known) :]).decode()
