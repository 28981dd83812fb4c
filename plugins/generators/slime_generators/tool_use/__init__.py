"""Turns of model and tools: the calls that end a turn are made, and answered by tokens that are not trained on.

::

    prompt | <tool>12*34</tool><|end|> | <|tool|>408<|end|><|assistant|> | The answer is 408.<|end|>
    mask   | 1 ...                   1 | 0 ...                         0 | 1 ...                    1

What may be called is `--tools-path` (a calculator without it), how calls are written `--tool-call-parser`. All state is
in the sample, so a partial sample continues in the middle of a turn, and one that was interrupted while its tools ran
calls them again. The turn is what the policy sampled since the last observation, told by `token_weight_versions`, not
by `loss_mask`, which may have been zeroed for off-policy tokens.
"""

from __future__ import annotations

import time
from typing import Any

from slime_core import Args, GenerateContext, Sample, SampleStatus
from slime_core.tools import ParsedTurn
from slime_generators.multi_turn import begin_answer, finished_turns, next_turn, turn_tokens
from slime_generators.tool_use.conversation import Conversation
from slime_generators.tool_use.running import ToolResult, answers, call_tool
from slime_generators.tool_use.settings import Options, Settings

__all__ = ["Options", "ToolResult", "call_tool", "generate"]

PENDING = "tool_calls_pending"
"""Key of the sample's metadata: `begin_answer`'s note while the tools run."""


async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any], *, context: GenerateContext) -> Sample:
    """Alternate model and tools until the model answers without a call.

    `max_new_tokens` counts observations too. The sample is TRUNCATED when tokens or turns run out.

    Raises:
        ValueError: The sample has no prompt tokens.
        ConfigError: The options, the tools or the parser cannot be used.
        DataError: The chat template refuses the tools' answers.
        EngineError: The engine refused the request or stopped answering.
    """
    if not sample.tokens:
        raise ValueError(f"sample {sample.index} has no prompt tokens; the data source sets `Sample.tokens`")
    settings = Settings.of(args, sample, context.tokenizer)
    conversation = Conversation(args, sample, context.tokenizer, settings)
    limit = int(sampling_params["max_new_tokens"])
    while await next_turn(args, sample, sampling_params, context, PENDING):
        turn = _parsed(sample, settings, context.tokenizer)
        if sample.status != SampleStatus.COMPLETED or not turn.attempts:
            return sample
        if finished_turns(sample) + 1 >= settings.max_turns or not await _answer(args, conversation, turn, limit):
            sample.metadata.pop(PENDING, None)
            sample.status = SampleStatus.TRUNCATED
            return sample
    return sample


def _parsed(sample: Sample, settings: Settings, tokenizer: Any) -> ParsedTurn:
    """Take the current turn apart; special tokens are kept, since markers may be some."""
    tokens = turn_tokens(sample)
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    before = tokenizer.decode(sample.tokens[: len(sample.tokens) - len(tokens)][-8:], skip_special_tokens=False)
    return settings.parser.parse(text, settings.schemas, reasoning_open=before.rstrip().endswith("<think>"))


async def _answer(args: Args, conversation: Conversation, turn: ParsedTurn, limit: int) -> bool:
    """Make the calls and append what they came to; False when it does not fit."""
    sample = conversation.sample
    started = time.monotonic()
    begin_answer(sample, PENDING)
    try:
        observation = conversation.observation(turn, await answers(args, sample, turn, conversation.settings))
    finally:
        sample.non_generation_time += time.monotonic() - started
    if sample.response_length + sum(len(piece.tokens) for piece in observation) > limit:
        return False
    conversation.append(observation)
    sample.metadata.pop(PENDING)
    return True
