"""Split a conversation into token pieces: the assistant's turns, and the text between them.

`rollout/sft_data.py` trains on the assistant's pieces; `slime tokens check` checks a template with this module. A
conversation is built as multi-turn generation builds it: prompt, turn, `turn_delta`, turn, ... Every turn is rendered
as the last turn, the form in which it would be sampled. It keeps this form in the context of later turns, also under a
template that rewrites history (Qwen3 strips the reasoning of turns before the last question).

::

    user   assistant          tool   assistant
    "1+2"  "" + call add      "3"    "It is 3."

    USER + TEMPLATE | DEMONSTRATION | TEMPLATE TOOL TEMPLATE | DEMONSTRATION | TEMPLATE
    prompt          | call, <end>   | turn_delta             | text, <end>   | rest of the turn's end
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from slime_data.turns import PLACEHOLDER, turn_delta

from slime_core.data.tokenizer import encode_rendered, render_messages, render_prompt
from slime_core.data.turns import rendered_spans
from slime_core.errors import DataError
from slime_core.sample.provenance import Source

STEP_LOSS_MASK = "step_loss_mask"
"""Message key; the turn is trained on only if its value is 1. Also the reason recorded for withheld tokens."""

Message = Mapping[str, Any]
_THINK = re.compile(r"</?think>")
_SHOWN = 80


class Piece(NamedTuple):
    """Consecutive tokens from one source."""

    ids: list[int]
    source: Source
    """Source of the tokens; DEMONSTRATION: a whole turn of the assistant, through its end token."""
    withheld: str = ""
    """Reason why a turn is not trained on; empty if it is trained on."""
    text: str = ""
    """Text of a turn; empty for other pieces."""
    position: int = -1
    """Position of a turn's message, from 0; -1 for other pieces."""

    @property
    def trained(self) -> bool:
        """Return whether the loss covers the piece."""
        return self.source == Source.DEMONSTRATION and not self.withheld


def conversation_pieces(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Message] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Piece]:
    """Return the pieces of the whole conversation, in order.

    Arguments of tool calls that are JSON text are parsed first, as servers do, if the template accepts objects.

    Args:
        tokenizer: HF tokenizer with a chat template.
        messages: Messages that `quoted_messages` has processed; at least one, but not the first, is the assistant's.
        tools: Tool schemas for the template.
        template_kwargs: Keyword arguments for the template.

    Raises:
        DataError: A trained turn would not be exactly the assistant's message and its end token; the error names the
            turn and the difference.
    """
    clean = [{k: v for k, v in m.items() if k != STEP_LOSS_MASK} for m in messages]
    withheld = ["" if _step_loss_mask(m, i) == 1 else STEP_LOSS_MASK for i, m in enumerate(messages)]
    parsed = [_parsed_calls(message) for message in clean]
    if parsed == clean:
        return _Conversation(tokenizer, clean, tools, template_kwargs).pieces(withheld)
    try:
        return _Conversation(tokenizer, parsed, tools, template_kwargs).pieces(withheld)
    except DataError:  # some templates take text only (DeepSeek-V3 appends it to a string)
        return _Conversation(tokenizer, clean, tools, template_kwargs).pieces(withheld)


def end_of_turn(tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> str:
    """Return the token that a policy samples last in a plain turn: its end, or the next message's start. DataError."""
    messages = [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": PLACEHOLDER}]
    turn = conversation_pieces(tokenizer, messages, None, template_kwargs)
    return next(piece.text for piece in turn if piece.position >= 0).partition(PLACEHOLDER)[2]


def _step_loss_mask(message: Message, position: int) -> int:
    value = message.get(STEP_LOSS_MASK, 1)
    if value is None:
        return 1
    if not isinstance(value, (int, float)) or value not in (0, 1):
        raise DataError(f"message {position}: {STEP_LOSS_MASK} is {value!r}; it must be 1 (train) or 0 (leave out)")
    return int(value)


def _parsed_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments)
    except json.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else call


class _Conversation:
    """A conversation under a chat template."""

    def __init__(
        self,
        tokenizer: Any,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> None:
        self._tokenizer, self._messages = tokenizer, messages
        self._tools, self._kwargs = tools, dict(template_kwargs or {})

    def pieces(self, withheld: Sequence[str]) -> list[Piece]:
        turns = [i for i, m in enumerate(self._messages) if m["role"] == "assistant"]
        if not turns:
            raise DataError("no message of the assistant's to train on")
        if not turns[0]:
            raise DataError("message 0 is the assistant's; there must be a message before it, which it answers")
        found = self._prompt(turns[0])
        for position, following in zip(turns, [*turns[1:], None]):
            turn = self._turn(position, following, checked=not withheld[position])
            found.append(turn._replace(withheld=withheld[position]))
            found += self._between(position, following, turn.ids)
        return found

    def _prompt(self, end: int) -> list[Piece]:
        messages = self._messages[:end]
        text = render_prompt(self._tokenizer, messages, self._tools, self._kwargs)
        ids, spans = rendered_spans(
            self._tokenizer, messages, text, tools=self._tools, template_kwargs=self._kwargs
        )  # fmt: skip
        starts = [sum(span.length for span in spans[:i]) for i in range(len(spans))]
        return [Piece(ids[at : at + s.length], s.source) for at, s in zip(starts, spans)]

    def _between(self, position: int, following: int | None, turn_ids: Sequence[int]) -> list[Piece]:
        """Return the pieces from the end of a turn to the next turn or the end of the conversation."""
        new = self._messages[position + 1 : following]
        return [Piece(ids, source) for ids, source in self._delta(position, new, turn_ids, following is not None)]

    def _delta(
        self, position: int, new: Sequence[Message], turn_ids: Sequence[int], prompt: bool
    ) -> list[tuple[list[int], Source]]:
        return turn_delta(
            self._tokenizer,
            None,
            self._messages[:position],
            new,
            tools=self._tools,
            sampled_ids=turn_ids,
            assistant=self._messages[position],
            add_generation_prompt=prompt,
            template_kwargs=self._kwargs,
        )

    def _turn(self, position: int, following: int | None, *, checked: bool) -> Piece:
        """Return the assistant's message as it is sampled: from the end of the generation prompt through its end token.

        With `checked`, raise DataError if the turn's text differs from the message; an untrained turn is not checked.
        """
        history, message = self._messages[:position], self._messages[position]
        before = render_prompt(self._tokenizer, history, self._tools, self._kwargs)
        written = self._render([*history, message])
        if not written.startswith(before):
            at = next((i for i, (a, b) in enumerate(zip(before, written)) if a != b), min(len(before), len(written)))
            raise DataError(
                f"message {position}: the chat template writes the turn otherwise than it prompts for it, so this is"
                f" not what would be sampled: {before[max(0, at - 12) :][:_SHOWN]!r} becomes"
                f" {written[max(0, at - 12) :][:_SHOWN]!r}. Give the template's switch in --apply-chat-template-kwargs,"
                " or use another template"
            )
        body, end = self._body_and_end(history, written[len(before) :])
        if checked:
            problem = difference(self._tokenizer, message, body + end)
            problem = problem or self._beside_the_notation(history, message, before, written[len(before) :])
            if problem is not None:
                raise DataError(f"message {position}: {problem}")
        end = end or self._next_speaker(position, following)
        text = body + end
        ids = encode_rendered(self._tokenizer, text)
        decoded = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if decoded != text:
            at = next((i for i, (a, b) in enumerate(zip(text, decoded)) if a != b), min(len(text), len(decoded)))
            raise DataError(
                f"message {position}: the tokenizer does not give back the assistant's text: at character {at},"
                f" {text[at:][:_SHOWN]!r} becomes {decoded[at:][:_SHOWN]!r}"
            )
        return Piece(ids, Source.DEMONSTRATION, "", text, position)

    def _body_and_end(self, history: Sequence[Message], text: str) -> tuple[str, str]:
        """Return the turn's text, and the sampled part of the template's text after it."""
        closed = self._render([*history, {"role": "assistant", "content": PLACEHOLDER}])
        end = closed.partition(PLACEHOLDER)[2]
        if text.endswith(end):
            return (text.removesuffix(end) if end else text), self._sampled_end(end)
        stripped = text.rstrip()
        for token in self._end_tokens():  # a turn with calls may end differently
            if stripped.endswith(token):
                return stripped.removesuffix(token), token
        return text, ""

    def _beside_the_notation(self, history: Sequence[Message], message: Message, before: str, text: str) -> str | None:
        """Describe text in a turn with calls that is neither the message's nor the template's notation, or None."""
        if not message.get("tool_calls"):
            return None
        other, words = with_holes(message)
        written = self._render([*history, other])
        if not written.startswith(before):
            return f"what the chat template writes before the turn changes with the words in it: {written!r:.99}"
        return notation_difference(written[len(before) :], words, text)

    def _sampled_end(self, end: str) -> str:
        """Return `end` through its first special token, where the engine stops; all of it without a special token."""
        found = [(end.find(token), -len(token)) for token in self._end_tokens() if token in end]
        return end[: min(found)[0] - min(found)[1]] if found else end

    def _end_tokens(self) -> list[str]:
        tokens = {self._tokenizer.eos_token, *self._tokenizer.all_special_tokens, *self._tokenizer.get_added_vocab()}
        return sorted((token for token in tokens if token), key=len, reverse=True)

    def _next_speaker(self, position: int, following: int | None) -> str:
        """Return the special token that begins the next message, or "" if it is no special token.

        The model samples this token if no token ends a turn (GLM-4). After the last message it is the token of a user's
        message, or of a tool's answer if the turn has calls.
        """
        message = self._messages[position]
        new = self._messages[position + 1 : following]
        if not new and following is None:
            calls = message.get("tool_calls")
            new = [{"role": "tool" if calls else "user", "content": "Go on."}]
        first = next((ids[0] for ids, _ in self._delta(position, new, (), following is not None) if ids), None)
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        return str(self._tokenizer.convert_ids_to_tokens(first)) if first in special else ""

    def _render(self, messages: Sequence[Message]) -> str:
        return render_messages(
            self._tokenizer, messages, self._tools, {**self._kwargs, "add_generation_prompt": False}
        )  # fmt: skip


# -- comparing a turn with its message -------------------------------------------------------------------


def difference(tokenizer: Any, message: Message, written: str) -> str | None:
    """Describe how a rendered turn differs from its message, or return None if they match.

    Without calls, the texts between special tokens and think tags must be equal, apart from surrounding white space.
    With calls, whose notation is the template's, the turn must contain the whole message: reasoning, text, names of the
    called tools and every value of their arguments. `notation_difference` checks for additional text.
    """
    fragments = list(_fragments(message))
    if message.get("tool_calls"):
        missing = next((f for f in fragments if not any(form in written for form in _forms(f[1]))), None)
        return None if missing is None else _left_out(*missing, written)
    markup = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab(), "<think>", "</think>"}
    split = re.compile("|".join(re.escape(token) for token in sorted(filter(None, markup), key=len, reverse=True)))
    found = [part.strip() for part in split.split(written) if part.strip()]
    wanted = [(what, part.strip()) for what, text in fragments for part in split.split(text) if part.strip()]
    if found == [text for _, text in wanted]:
        return None
    for what, text in wanted:
        if text not in found:
            return _left_out(what, text, written)
    added = next((text for text in found if text not in {text for _, text in wanted}), written)
    return f"the chat template writes {added[:_SHOWN]!r} in the assistant's turn, and the message does not"


_HOLE = re.compile(r"demonstratedpart(\d+)placeholder|90210(\d{6})(?:\.5)?")


def with_holes(message: Message) -> tuple[dict[str, Any], list[str | int | float]]:
    """Return the message with placeholders, and the replaced words: texts, reasoning, strings and numbers of arguments.

    Names, keys and arguments that are JSON text are not replaced, since templates depend on them.
    """
    words: list[str | int | float] = []

    def hole(word: Any) -> Any:
        words.append(word)
        number = len(words) - 1
        if isinstance(word, str):
            return f"demonstratedpart{number}placeholder"
        return type(word)(90_210_000_000 + number) + (0.5 if isinstance(word, float) else 0)

    def text(value: Any) -> Any:
        if isinstance(value, list):
            return [{**p, "text": text(p["text"])} if isinstance(p, Mapping) and "text" in p else p for p in value]
        if not isinstance(value, str):
            return value
        parts = re.split(r"(</?think>)", value)
        said = [part.strip() if number % 2 == 0 else "" for number, part in enumerate(parts)]
        return "".join(part.replace(word, hole(word), 1) if word else part for part, word in zip(parts, said))

    def argument(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: argument(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [argument(inner) for inner in value]
        holds = bool(value.strip()) if isinstance(value, str) else type(value) in (int, float)
        return hole(value) if holds else value

    def call(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if isinstance(value.get("function"), Mapping):
            return {**value, "function": call(value["function"])}
        given = value.get("arguments")
        return {**value, "arguments": argument(given)} if isinstance(given, dict) else value

    keys = [key for key in ("reasoning_content", "reasoning", "content") if key in message]
    made = {**message, **{key: text(message[key]) for key in keys}}
    return {**made, "tool_calls": [call(value) for value in message["tool_calls"]]}, words


def notation_difference(framed: str, words: Sequence[str | int | float], written: str) -> str | None:
    """Describe how a turn with calls differs from the notation filled with its words, or return None if they match.

    Args:
        framed: The template's text with placeholders for the words.
        words: Words from `with_holes`.
        written: The template's text with the words.
    """
    pattern, begin, at = "", 0, 0
    for found in [*_HOLE.finditer(framed), None]:
        at, pattern = begin, pattern + re.escape(framed[begin : found.start() if found else None])
        if not re.match(pattern, written):
            break
        if found is not None:
            word = words[int(found[1] or found[2])]
            forms = _forms(word) if isinstance(word, str) else [json.dumps(word), str(word)]
            pattern, begin = f"{pattern}(?:{'|'.join(map(re.escape, forms))})", found.end()
    if re.fullmatch(pattern, written):
        return None
    return (
        f"the chat template writes {framed[at:][:_SHOWN]!r} around the words of such a turn, and {written[:_SHOWN]!r}"
        " with these; so what of that is the assistant's cannot be told. Set step_loss_mask: 0 on it, or use another"
        " template"
    )


def _left_out(what: str, text: str, written: str) -> str:
    return (
        f"the assistant's {what} {text[:_SHOWN]!r} is not in what the chat template writes for it, {written[:_SHOWN]!r}"
        ". Set step_loss_mask: 0 on it, leave that out of the message, or use a template that writes it"
    )


def _fragments(message: Message) -> Iterator[tuple[str, str]]:
    for key in ("reasoning_content", "reasoning"):
        if isinstance(message.get(key), str) and message[key].strip():
            yield "reasoning", message[key].strip()
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [str(p["text"]) for p in content if isinstance(p, Mapping) and isinstance(p.get("text"), str)]
    else:
        parts = [content] if isinstance(content, str) else []
    yield from (("text", piece.strip()) for text in parts for piece in _THINK.split(text) if piece.strip())
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        if function.get("name"):
            yield "tool call", str(function["name"])
        for leaf in _leaves(function.get("arguments")):
            yield "argument", leaf


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        if value.strip():
            yield value
    elif value is not None:
        yield json.dumps(value)


def _forms(fragment: str) -> list[str]:
    """Return the fragment as it is, as JSON (with and without non-ASCII escapes), and as Jinja's `tojson` writes it."""
    plain, ascii_only = json.dumps(fragment, ensure_ascii=False)[1:-1], json.dumps(fragment)[1:-1]
    escaped = [
        text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("'", "\\u0027")
        for text in (plain, ascii_only)
    ]
    return list(dict.fromkeys([fragment, fragment.strip(), plain, ascii_only, *escaped]))
