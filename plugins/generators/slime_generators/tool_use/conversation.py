"""The turns of a sample: the tokens of the current turn, and the answers to its calls that follow it.

Sampled tokens are never encoded again. What stands behind a turn is the chat template's text behind a placeholder
(`turn_delta`); a tokenizer without a template is given `tool_observation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from slime_core import Args, Sample, encode_result, turn_delta
from slime_core.errors import DataError
from slime_core.tools import IllFormedCall, ParsedTurn, ToolCall
from slime_generators.multi_turn import UNTEMPLATED, cut, keep_messages, turn_tokens
from slime_generators.tool_use.running import ToolResult
from slime_generators.tool_use.settings import Settings

MESSAGES = "tool_messages"
"""Key of the sample's metadata: chat messages after the prompt so far."""


class Piece(NamedTuple):
    """Tokens of one author."""

    tokens: list[int]
    source: str
    text: str


class Observation(list[Piece]):
    """The pieces that are appended to a turn."""

    messages: Sequence[Mapping[str, Any]] = ()
    """Messages of the turn and of the answers to its calls."""


class Conversation:
    """The conversation that begins with the sample's prompt."""

    def __init__(self, args: Args, sample: Sample, tokenizer: Any, settings: Settings) -> None:
        self.sample, self.settings = sample, settings
        self._args, self._tokenizer = args, tokenizer
        keep_messages(sample, MESSAGES)

    def observation(self, turn: ParsedTurn, results: Sequence[ToolResult]) -> Observation:
        """Return the answers as tokens, up to the model's next turn. Raises DataError if the template refuses them."""
        texts = [cut(self._tokenizer, result.text, self.settings.tool_result_tokens) for result in results]
        answered = [_tool_message(attempt, i, text) for i, (attempt, text) in enumerate(zip(turn.attempts, texts))]
        assistant = _assistant_message(turn)
        template = self.settings.tool_observation
        if template is None and getattr(self._tokenizer, "chat_template", None):
            try:
                observation = self._templated(assistant, answered)
            except DataError:  # Llama 3's template refuses several calls in one message; the results fit without it
                if "tool_calls" not in assistant:
                    raise
                del assistant["tool_calls"]
                observation = self._templated(assistant, answered)
        else:
            said, noted = "\n".join(texts), self.sample.metadata
            ids = encode_result(self._tokenizer, template or UNTEMPLATED, said, self._args, noted)
            observation = Observation([Piece(ids, "tool", self._tokenizer.decode(ids, skip_special_tokens=False))])
        observation.messages = [assistant, *answered]
        return observation

    def append(self, observation: Observation) -> None:
        """Append the observation to the sample's response, untrained."""
        self.sample.metadata.setdefault(MESSAGES, []).extend(observation.messages)
        for piece in observation:
            self.sample.append_response_tokens(
                self._args, piece.tokens, trainable=False, text=piece.text, source=piece.source
            )

    def _templated(self, assistant: Mapping[str, Any], answered: Sequence[Mapping[str, Any]]) -> Observation:
        prompt = self.sample.prompt
        begun = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        pieces = turn_delta(
            self._tokenizer,
            self._args,
            [*begun, *self.sample.metadata.get(MESSAGES, [])],
            answered,
            tools=self.settings.told or None,
            sampled_ids=turn_tokens(self.sample),
            assistant=assistant,
            template_kwargs=self.sample.apply_chat_template_kwargs,
            noted=self.sample.metadata,
        )
        decode = self._tokenizer.decode
        return Observation(Piece(ids, source, decode(ids, skip_special_tokens=False)) for ids, source in pieces)


def _assistant_message(turn: ParsedTurn) -> dict[str, Any]:
    """Return the turn as a message, for templates that read the calls of earlier turns; never encode its text."""
    calls = [
        {
            "id": attempt.id or f"call_{i}",
            "type": "function",
            "function": {"name": attempt.name, "arguments": _arguments(attempt)},
        }
        for i, attempt in enumerate(turn.attempts)
        if attempt.name
    ]
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    return {**message, "tool_calls": calls} if calls else message


def _arguments(attempt: ToolCall | IllFormedCall) -> dict[str, Any]:
    return attempt.arguments if isinstance(attempt, ToolCall) and isinstance(attempt.arguments, dict) else {}


def _tool_message(attempt: ToolCall | IllFormedCall, position: int, text: str) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": attempt.id or f"call_{position}",
        "name": attempt.name or "unknown",
        "content": text,
    }
