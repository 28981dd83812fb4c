"""Token ids between two sampled turns: the rest of the turn's end, new messages, the next generation prompt.

Generators with a chat template call `turn_delta` after each turn. Sampled text is never encoded again. The conversation
is rendered with a placeholder for the sampled turn, and only the text after the placeholder becomes ids. So a template
that renders earlier turns differently later (Qwen3 strips their reasoning) cannot change the tokens that the policy has
seen.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from slime_core.data.tokenizer import Message, encode_rendered, quoted_messages, render_messages
from slime_core.data.turns import encoded, places
from slime_core.errors import DataError
from slime_core.protocols import Args
from slime_core.sample.provenance import Source

__all__ = ["PLACEHOLDER", "turn_delta"]

PLACEHOLDER = "assistantturnplaceholder"
"""Placeholder for a sampled turn: a single word, so that no template trims or splits it."""


def turn_delta(
    tokenizer: Any,
    args: Args | None,
    messages: Sequence[Message],
    new_messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    sampled_ids: Sequence[int] = (),
    assistant: Message | None = None,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
    noted: MutableMapping[str, Any] | None = None,
) -> list[tuple[list[int], Source]]:
    """Return the ids to append after a sampled assistant turn, with their sources, in order.

    Args:
        tokenizer: HF tokenizer with a chat template.
        args: Read for `apply_chat_template_kwargs`, unless `template_kwargs` is given, and for
            `content_special_tokens`: the new messages are an environment's. None: the caller has `quoted` them.
        messages: The conversation before the sampled turn.
        new_messages: Messages after the turn: tool results, the user's next message. Consecutive tool messages must
            come in one call, because templates group them.
        tools: Tool schemas, as given for the prompt.
        sampled_ids: The turn's ids. Tokens of the turn's end that they already contain are not repeated.
        assistant: The sampled turn as a message, for templates that read its `tool_calls`; its `content` is not used.
        add_generation_prompt: End with the generation prompt of the assistant.
        template_kwargs: Arguments for the chat template.
        noted: The sample's metadata, in which quoted tokens are counted.

    Raises:
        DataError: The template refuses the messages, or its text after the turn cannot be determined.
    """
    if template_kwargs is None and args is not None:
        template_kwargs = args.apply_chat_template_kwargs
    if args is not None:
        new_messages = quoted_messages(tokenizer, new_messages, args, noted, environment=True)
    turn = _Turn(tokenizer, tools, template_kwargs, messages, assistant, _closing(tokenizer, sampled_ids))

    def render(new: Sequence[Message], prompt: bool) -> str:
        return turn.after(new, prompt and add_generation_prompt)

    text = render(new_messages, True)
    ids, sources, ends = encoded(tokenizer, text, places(text, new_messages, render))
    num_end = sum(end <= len(turn.end) for end in ends) if ends else len(encode_rendered(tokenizer, turn.end))
    done = _already_sampled(tokenizer, ids, sampled_ids, num_end)
    pieces: list[tuple[list[int], Source]] = []
    for token, source in zip(ids[done:], sources[done:]):
        if pieces and pieces[-1][1] == source:
            pieces[-1][0].append(token)
        else:
            pieces.append(([token], source))
    return pieces


class _Turn:
    """Render the text after one sampled turn, with a placeholder for the turn, and cut at the placeholder.

    A second rendering, with no message after the turn, shows how the template ends such a turn. It is not needed if
    the turn was sampled up to a special token that the template also writes there. Then the text after the token
    follows the turn, however the template treats the conversation's length or its last message.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
        messages: Sequence[Message],
        assistant: Message | None,
        closing: str,
    ) -> None:
        self._tokenizer, self._tools, self._kwargs = tokenizer, tools, template_kwargs or {}
        self._messages, self._closing = messages, closing
        self._plain: Message = {"role": "assistant", "content": PLACEHOLDER}
        self._calls = assistant is not None and bool(assistant.get("tool_calls"))
        self._turn = {**(assistant or {}), **self._plain} if self._calls else self._plain
        self.end = ""
        """Text that ends the turn, as far as it matters for the sampled text; set by `after`."""
        self._before: str | None = None
        """The conversation up to the end of the turn, with the calls."""

    def after(self, new: Sequence[Message], generation_prompt: bool) -> str:
        """Return the end of the turn, `new`, and the generation prompt."""
        whole = self._render([*self._messages, self._turn, *new], generation_prompt)
        return self._after_calls(whole) if self._calls else self._after_text(whole)

    def _after_text(self, whole: str) -> str:
        text = self._behind(whole, "the turn and new messages")
        if self._closing and text.startswith(self._closing):
            self.end = self._closing
            return text
        self._ask()
        if not text.startswith(self.end):
            raise self._undefined(f"ends a turn with {self.end!r} while it is the last, and then {text[:80]!r}")
        return text

    def _after_calls(self, whole: str) -> str:
        if self._before is None:
            self._before = self._render([*self._messages, self._turn], False)
        before = self._before
        if PLACEHOLDER in before:  # text before the turn may be rewritten and is ignored
            before, whole = self._behind(before, "the turn"), self._behind(whole, "the turn and new messages")
        if PLACEHOLDER in self._before and self._closing and self._closing in before:
            self.end = before[before.rindex(self._closing) :]
        else:
            self._ask()
        if not whole.startswith(before):
            at = next((i for i, (a, b) in enumerate(zip(before, whole)) if a != b), min(len(before), len(whole)))
            raise self._undefined(
                f"writes a turn with tool calls otherwise once messages follow: {before[at : at + 60]!r} becomes"
                f" {whole[at : at + 60]!r}"
            )
        return self.end + whole[len(before) :]

    def _ask(self) -> None:
        """Render the turn's text with no message after it."""
        if not self.end:
            self.end = self._behind(self._render([*self._messages, self._plain], False), "the turn")

    def _render(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        kwargs = {**self._kwargs, "add_generation_prompt": generation_prompt}
        return render_messages(self._tokenizer, messages, self._tools, kwargs)

    def _behind(self, text: str, what: str) -> str:
        if text.count(PLACEHOLDER) != 1:
            raise self._undefined(f"writes the text of an assistant's turn {text.count(PLACEHOLDER)} times for {what}")
        return text[text.index(PLACEHOLDER) + len(PLACEHOLDER) :]

    def _undefined(self, what: str) -> DataError:
        name = self._tokenizer.name_or_path or "the tokenizer"
        return DataError(
            f"the chat template of {name} {what}; so what follows a sampled turn is not defined. `slime tokens check`"
            " shows it; use another template (chat_template.jinja in the model directory), or single-turn generation"
        )


def _closing(tokenizer: Any, sampled_ids: Sequence[int]) -> str:
    """Return the special token at the end of the sampled turn, if it occurs only there."""
    if not sampled_ids or not _is_special(tokenizer, sampled_ids[-1]) or sampled_ids[-1] in sampled_ids[:-1]:
        return ""
    return str(tokenizer.decode(list(sampled_ids[-1:]), skip_special_tokens=False))


def _already_sampled(tokenizer: Any, ids: Sequence[int], sampled_ids: Sequence[int], num_end: int) -> int:
    """Return how many of `ids` are already at the end of the sampled turn.

    At most the `num_end` ids that end a turn. If the template writes no end, a special token that begins the next
    message: GLM-4 samples it to name the next speaker.
    """
    longest = num_end or int(bool(ids) and _is_special(tokenizer, ids[0]))
    for count in range(min(longest, len(sampled_ids)), 0, -1):
        if list(sampled_ids[-count:]) == list(ids[:count]):
            return count
    return 0


def _is_special(tokenizer: Any, token: int) -> bool:
    return token in tokenizer.all_special_ids or token in tokenizer.added_tokens_decoder
