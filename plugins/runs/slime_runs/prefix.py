"""Start again from the middle of a stored sample: its prompt, and the kept or replaced part of its response."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from slime_core.data.tokenizer import encode_result
from slime_core.protocols import Args
from slime_core.sample import Sample, SampleStatus, provenance
from slime_core.sample.provenance import NOT_SAMPLED, Source
from slime_runs.run import RunError

_COLUMNS = ("loss_mask", "rollout_log_probs", "token_weight_versions")


@dataclass(frozen=True)
class Beginning:
    """The kept part of one sample, in response tokens."""

    length: int
    """Number of kept tokens; the model continues after them."""
    answer: tuple[int, int] | None
    """[first, last) of the replaced tool answer among the kept tokens."""
    version: int | None
    """Version of the weights that sampled the following tokens."""


def beginning(sample: Sample, from_token: int, *, replaces_answer: bool, any_weights: bool, where: str) -> Beginning:
    """Return the first place at or after `from_token` where the model takes over.

    With `replaces_answer`, it is a place right after a tool's answer.

    Raises:
        RunError: No such place, or (without `any_weights`) several weight versions sampled the following tokens.
    """
    if not 0 <= from_token < sample.response_length:
        raise RunError(f"--from-token {from_token}: {where} has the response tokens 0 to {sample.response_length - 1}")
    length, answer = _place(sample, from_token, replaces_answer, where)
    versions = sample.token_weight_versions
    later = sorted({v for v in versions[length:] if v != NOT_SAMPLED})
    if len(later) > 1 and not any_weights:
        raise RunError(
            f"{where}: weights of the versions {', '.join(map(str, later))} sampled it; from token"
            f" {versions.index(later[-1])} on it was {later[-1]}: --from-token {versions.index(later[-1])}, or choose"
            " with --weights STEP"
        )
    return Beginning(length, answer, later[0] if later else None)


def _place(sample: Sample, from_token: int, replaces_answer: bool, where: str) -> tuple[int, tuple[int, int] | None]:
    answer = None
    start = sample.response_length - len(sample.tokens)
    for span in sample.known_spans():
        end = start + span.length
        if span.source == Source.TOOL and start >= from_token:
            answer = answer or (start, end)
        if span.source == Source.SAMPLED and end > from_token and (answer or not replaces_answer):
            return max(start, from_token), answer if replaces_answer else None
        start = end
    what = "answer of a tool that the model went on after" if replaces_answer else "token that the model sampled"
    raise RunError(f"{where}: there is no {what} from token {from_token} on")


def begun(args: Args, sample: Sample, at: Beginning, tokenizer: Any, answer: str | None) -> Sample:
    """Return the sample as an interrupted rollout would have left it at that place, ready to be continued."""
    sample = copy.deepcopy(sample)
    sample.metadata.pop("failure", None)
    if not at.length:
        sample.reset_for_retry()
        return sample
    prompt, spans = len(sample.tokens) - sample.response_length, sample.known_spans()
    if at.answer is None or answer is None:
        _cut(sample, prompt, spans, at.length)
    else:
        first, last = at.answer
        tokens = sample.tokens
        _cut(sample, prompt, spans, first)
        sample.append_response_tokens(
            tokens=encode_result(tokenizer, "{result}", answer, args, sample.metadata),
            trainable=False,
            source=Source.TOOL,
            update_terminal_info=False,
        )
        for span in provenance.part(spans, prompt + last, prompt + at.length):
            sample.append_response_tokens(
                tokens=tokens[prompt + last : prompt + last + span.length],
                trainable=False,
                source=span.source,
                update_terminal_info=False,
            )
            last += span.length
    sample.response = tokenizer.decode(sample.response_tokens, skip_special_tokens=args.rollout_skip_special_tokens)
    return sample


def _cut(sample: Sample, prompt: int, spans: provenance.Spans, length: int) -> None:
    sample.tokens, sample.spans = sample.tokens[: prompt + length], provenance.part(spans, 0, prompt + length)
    sample.response_length = length
    for name in _COLUMNS:
        column = getattr(sample, name)
        setattr(sample, name, column[:length] if column else column)
    sample.teacher_log_probs = sample.rollout_routed_experts = None
    if sample.rollout_top_p_token_offsets is not None:
        offsets = sample.rollout_top_p_token_offsets[: length + 1]
        sample.rollout_top_p_token_ids = (sample.rollout_top_p_token_ids or [])[: offsets[-1]]
        sample.rollout_top_p_token_offsets = offsets
    sample.turns = [turn for turn in sample.turns or () if turn.last <= length] or None
    sample.reward, sample.reward_components = None, None
    sample.remove_sample, sample.status = False, SampleStatus.PENDING
