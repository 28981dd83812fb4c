"""An assistant turn -> its reasoning and the rest.

The opening tag is often not in the turn, because the chat template put it into the prompt. A closing tag without an
opening one therefore ends reasoning that began with the turn.
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def split_reasoning(text: str, *, opened: bool = False, tags: tuple[str, str] = (OPEN, CLOSE)) -> tuple[str, str, bool]:
    """(reasoning, rest, whether the turn ended inside its reasoning).

    Args:
        text: The turn.
        opened: The prompt ended inside the reasoning.
        tags: Opening and closing tag.
    """
    start, end = tags
    body = text.lstrip()
    began = body.startswith(start)
    if began:
        body = body[len(start) :]
    elif not opened and end not in text:
        return "", text, False
    elif not opened and start in text and text.index(start) < text.index(end):
        return "", text, False  # a pair inside the content: quoted, not thought
    reasoning, closed, rest = body.partition(end)
    return reasoning.strip(), rest if closed else "", not closed
