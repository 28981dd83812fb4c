"""Token ids of a rendered conversation, and the author of each: a message's source, or the template.

The data source calls `rendered_spans` for prompts; `turn_delta`, which a plugin has (`slime_data.turns`), calls
`places` and `encoded`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_core.data.tokenizer import Message, Tokenizer, Tools, encode_rendered, render_messages, spelled
from slime_core.distributions import provided
from slime_core.sample import provenance
from slime_core.sample.provenance import Source, Spans, source_of


def rendered_spans(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    text: str,
    *,
    tools: Tools = None,
    template_kwargs: Mapping[str, object] | None = None,
) -> tuple[list[int], Spans]:
    """Return a rendered prompt's ids and their authors; an assistant's messages in it count as demonstrations.

    Args:
        tokenizer: HF tokenizer with a chat template.
        messages: The conversation, after `quoted_messages`.
        text: The result of `render_prompt` for the conversation and the other arguments.
        tools: Tool schemas.
        template_kwargs: For the chat template.
    """

    def render(shown: Sequence[Message], prompt: bool) -> str:
        kwargs = {**(template_kwargs or {}), "add_generation_prompt": prompt}
        return render_messages(tokenizer, shown, tools, kwargs)

    ids, sources, _ = encoded(tokenizer, text, places(text, messages, render))
    spans: Spans = []
    for source in sources:
        provenance.add_span(spans, source, 1, "context" if source == Source.DEMONSTRATION else "")
    return ids, spans


_MARK = "messagenumber{}placeholder"
_MANY = 100
_Place = tuple[int, int, Source]
"""Characters [begin, end) of a text."""
_Render = Callable[[Sequence[Message], bool], str]
"""Messages, and whether the generation prompt follows -> the text."""


def places(text: str, messages: Sequence[Message], render: _Render) -> list[_Place]:
    """Return the places of the messages' own words in `text`, in order.

    If a message's words occur exactly once, that is their place. Otherwise the same messages are rendered with marks
    instead of words, which shows the template's text between them. If a message cannot be found this way either (a
    template that writes its words as JSON), it gets all remaining text except the generation prompt. If there are many
    messages, the marks are tried first, because a search through the text for each message takes quadratic time.
    """
    if len(messages) > _MANY and len(framed := _framed_places(text, messages, render)) == len(messages):
        return framed
    places: list[_Place] = []
    position = 0
    for message in messages:
        words = _words(message)
        at = text.find(words, position)
        if at < 0:
            words = words.strip()
            at = text.find(words, position)
        if at < 0 or (words and text.find(words, at + 1) >= 0):
            return _framed_places(text, messages, render)
        places.append((at, at + len(words), source_of(str(message.get("role")))))
        position = at + len(words)
    return places


def _framed_places(text: str, messages: Sequence[Message], render: _Render) -> list[_Place]:
    marked = render([{**m, "content": _MARK.format(i)} for i, m in enumerate(messages)], True)
    frames: list[str] = []
    for number in range(len(messages)):
        frame, mark, rest = marked.partition(_MARK.format(number))
        if not mark:
            break
        frames.append(frame)
        marked = rest
    else:
        frames.append(marked)
    places: list[_Place] = []
    position = len(frames[0]) if frames and text.startswith(frames[0]) else 0
    for number, message in enumerate(messages):
        source, raw = source_of(str(message.get("role"))), _words(message)
        following = frames[number + 1] if number + 1 < len(frames) else None
        for words in (raw, raw.strip()):
            if following is not None and text.startswith(words + following, position):
                places.append((position, position + len(words), source))
                position += len(words) + len(following)
                break
        else:
            prompt = render(messages, True).removeprefix(render(messages, False))
            return [*places, (position, len(text.removesuffix(prompt)), source)]
    return places


def _words(message: Message) -> str:
    """Return a message's text; if the content has parts, the text of its text parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(p["text"]) for p in content if isinstance(p, Mapping) and isinstance(p.get("text"), str))
    return ""


def encoded(tokenizer: Tokenizer, text: str, places: Sequence[_Place]) -> tuple[list[int], list[Source], list[int]]:
    """Return the ids of `text`, the author of each, and the character before which each ends.

    A token belongs to a message if any of its characters does. With a tokenizer without offsets, all tokens belong to
    the message with the most characters, and there are no ends.
    """
    if not tokenizer.is_fast:
        ids = encode_rendered(tokenizer, text)
        longest = max(places, key=lambda place: place[1] - place[0], default=(0, 0, Source.TEMPLATE))
        return ids, [longest[2]] * len(ids), []
    ids, offsets, pieces = [], [], spelled(tokenizer, text)
    if len(pieces) > 1:
        places = _spelled_places(tokenizer, text, places)
    length = 0
    for piece in pieces:
        encoding = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)
        ids += encoding["input_ids"]
        offsets += [(begin + length, end + length) for begin, end in encoding["offset_mapping"]]
        length += len(piece)
    filled = [place for place in places if place[0] < place[1]]
    ends = [end for _, end, _ in filled]
    sources = []
    for begin, end in offsets:
        at = bisect_right(ends, begin)
        inside = at < len(filled) and filled[at][0] < end
        sources.append(filled[at][2] if inside else Source.TEMPLATE)
    return ids, sources, [end for _, end in offsets]


def _spelled_places(tokenizer: Tokenizer, text: str, places: Sequence[_Place]) -> list[_Place]:
    """Return the places in the spelled text, which is longer than the original text."""
    found: list[_Place] = []
    at = length = 0
    for begin, end, source in places:
        length += sum(map(len, spelled(tokenizer, text[at:begin])))
        start = length
        length += sum(map(len, spelled(tokenizer, text[begin:end])))
        found.append((start, length, source))
        at = end
    return found


def __getattr__(name: str) -> Any:
    if name == "turn_delta":  # documented under this module, too
        return provided("slime.api", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
