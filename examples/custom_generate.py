r"""A custom generate function: after a wrong answer, the model gets feedback and tries once more.

    slime train --config demo.yaml --custom-generate-function-path examples/custom_generate.py \
        --rollout-max-response-len 64

::

    prompt | \boxed{75}<|end|> | <|user|>wrong<|end|><|assistant|> | 7+8=15 3+4+1=8 \boxed{85}<|end|>
    mask   | 1 ...           1 | 0 ...                           0 | 1 ...                          1

All tokens are added by `append_response_tokens`, which keeps ids, log-probs, loss mask and weight versions aligned:
tokens sampled by the model are trained on, tokens of the environment are not. The function may get a sample that
already has a response (an unfinished sample of an earlier rollout); the sample has everything needed to continue.
"""

from __future__ import annotations

import re
from typing import Any

from slime_core import GenerateContext, Sample

FEEDBACK = "<|user|>wrong<|end|><|assistant|>"
"""Feedback in the chat format of the demo tokenizer; another model needs another format."""


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], *, context: GenerateContext) -> Sample:
    """Generate an attempt, and a second one after feedback; `max_new_tokens` limits all of it together."""
    limit = int(sampling_params["max_new_tokens"])
    await _attempt(args, sample, sampling_params, limit, context)
    if sample.status != Sample.Status.COMPLETED or FEEDBACK in sample.response or _is_right(sample):
        return sample
    feedback = context.tokenizer.encode(FEEDBACK, add_special_tokens=False)
    if sample.response_length + len(feedback) > limit:
        return sample
    sample.append_response_tokens(args, feedback, trainable=False, text=FEEDBACK)
    await _attempt(args, sample, sampling_params, limit, context)
    return sample


async def _attempt(args: Any, sample: Sample, params: dict[str, Any], limit: int, context: GenerateContext) -> None:
    room = limit - sample.response_length
    if room <= 0:
        sample.status = Sample.Status.TRUNCATED
        return
    output = await context.engine.generate(
        sample.tokens, {**params, "max_new_tokens": room}, session_id=sample.session_id
    )
    # Also sets the status: COMPLETED, TRUNCATED, or ABORTED. After ABORTED, do not call the engine again.
    sample.append_response_tokens(
        args, output.token_ids, output.log_probs, meta_info=output.meta_info, text=output.text
    )


def _is_right(sample: Sample) -> bool:
    answers = re.findall(r"\\boxed\{([^{}]*)\}", sample.response)
    return bool(answers) and answers[-1] == str(sample.label)
