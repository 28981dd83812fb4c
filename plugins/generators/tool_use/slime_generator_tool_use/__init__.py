"""Turns of model and calculator: a turn that ends in `<tool>12*34</tool>` is answered with `408`, untrained.

::

    prompt | <tool>12*34</tool><|end|> | <|tool|>408<|end|><|assistant|> | The answer is 408.<|end|>
    mask   | 1 ...                   1 | 0 ...                         0 | 1 ...                    1

What a reader would get wrong: all state is in the sample, so a partial sample continues in the middle of a turn. The
turn is what the policy sampled since the last observation, told by `token_weight_versions`, not by `loss_mask`,
which may have been zeroed for off-policy tokens.

Settings, from `sample.metadata`, else `args` (`--custom-config-path`): `max_turns`, the number of model turns (4);
`tool_observation`, the text of an observation with `{result}` in it.
"""

from __future__ import annotations

import itertools
import re
import time
from typing import Any

from slime_core import GenerateContext, Sample, SampleStatus
from slime_generator_tool_use.calculator import calculate

DEFAULT_MAX_TURNS = 4
DEFAULT_OBSERVATION = "<|tool|>{result}<|end|><|assistant|>"

_CALL = re.compile(r"<tool>([^<]*)</tool>\s*(?:<[^<>]*>)?\s*\Z")
"""A call ends the turn; at most the tokenizer's end-of-turn token follows it."""


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], *, context: GenerateContext) -> Sample:
    """Alternate model and calculator until the model answers without a call.

    `max_new_tokens` counts observations too. The sample is TRUNCATED when tokens or turns run out.

    Raises:
        ValueError: The sample has no prompt tokens, or `tool_observation` has no `{result}`.
        EngineError: The engine refused the request or stopped answering.
    """
    if not sample.tokens:
        raise ValueError(f"sample {sample.index} has no prompt tokens; the data source sets `Sample.tokens`")
    limit = int(sampling_params["max_new_tokens"])
    turns_left = int(_setting(args, sample, "max_turns", DEFAULT_MAX_TURNS)) - _finished_turns(sample)
    while True:
        room = limit - sample.response_length
        if room <= 0:
            sample.status = SampleStatus.TRUNCATED
            return sample
        output = await context.engine.generate(
            sample.tokens, {**sampling_params, "max_new_tokens": room}, session_id=sample.session_id
        )
        sample.append_response_tokens(
            args, output.token_ids, output.log_probs, meta_info=output.meta_info, text=output.text
        )
        turns_left -= 1
        expression = _tool_call(sample, context.tokenizer)
        if sample.status != SampleStatus.COMPLETED or expression is None:
            return sample
        if turns_left <= 0 or not _observe(args, sample, expression, limit, context.tokenizer):
            sample.status = SampleStatus.TRUNCATED
            return sample


def _tool_call(sample: Sample, tokenizer: Any) -> str | None:
    """The expression of the call that ends the current turn; special tokens are kept, since tags may be some."""
    turn = sample.response_tokens[_turn_start(sample) :]
    match = _CALL.search(tokenizer.decode(turn, skip_special_tokens=False))
    return match[1] if match else None


def _observe(args: Any, sample: Sample, expression: str, limit: int, tokenizer: Any) -> bool:
    """Append the calculator's answer as untrained tokens; False when it does not fit."""
    started = time.monotonic()
    template = str(_setting(args, sample, "tool_observation", DEFAULT_OBSERVATION))
    if "{result}" not in template:
        raise ValueError(f"tool_observation {template!r} has no {{result}} in it")
    text = template.replace("{result}", calculate(expression))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if sample.response_length + len(tokens) > limit:
        return False
    sample.append_response_tokens(args, tokens, trainable=False, text=text)
    sample.non_generation_time += time.monotonic() - started
    return True


def _turn_start(sample: Sample) -> int:
    """Where in the response the current turn begins: after the last token that no policy sampled."""
    versions = sample.token_weight_versions
    return next((i + 1 for i in range(len(versions) - 1, -1, -1) if versions[i] < 0), 0)


def _finished_turns(sample: Sample) -> int:
    """Model turns before the current one: each is followed by one run of observation tokens."""
    versions = sample.token_weight_versions
    return sum(1 for before, after in itertools.pairwise(versions) if before >= 0 > after)


def _setting(args: Any, sample: Sample, name: str, default: Any) -> Any:
    value = sample.metadata.get(name, getattr(args, name, None))
    return default if value is None else value
