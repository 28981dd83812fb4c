"""An assistant turn -> its reasoning and the rest.

The opening tag is often not in the turn, because the chat template put it into the prompt. A closing tag without an
opening one therefore ends reasoning that began with the turn.
"""

from __future__ import annotations

from collections.abc import Callable

OPEN, CLOSE = "<think>", "</think>"


def split_reasoning(
    text: str,
    *,
    opened: bool = False,
    tags: tuple[str, str] = (OPEN, CLOSE),
    call_begun: Callable[[str], bool] = lambda before: False,
) -> tuple[str, str, bool]:
    """Return (reasoning, rest, True if the turn ended inside its reasoning).

    Args:
        text: The turn.
        opened: The prompt ended inside the reasoning.
        tags: Opening and closing tag.
        call_begun: Returns True if a beginning of the turn has a call, so that a closing tag after it closes nothing.
            Asked only of a turn whose reasoning was not opened.
    """
    start, end = tags
    body = text.lstrip()
    began = body.startswith(start)
    if began:
        body = body[len(start) :]
    elif not opened:
        at = body.find(end)
        if at < 0 or 0 <= body.find(start) < at or call_begun(body[:at]):
            return "", text, False  # no closing tag, a quoted pair, or a tag after a call began
    reasoning, closed, rest = body.partition(end)
    return reasoning.strip(), rest if closed else "", not closed
