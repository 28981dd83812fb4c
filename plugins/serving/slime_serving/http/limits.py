"""How much a client may ask for, checked before anything is computed in proportion to it."""

from __future__ import annotations

from slime_serving.http.errors import BadRequest

MOST_ANSWERS = 1024
"""Answers of one request: prompts times `n`."""
MOST_AT_ONCE = 64
"""Answers of one request that the engine makes at a time: others' requests come between those that wait."""
CHARACTERS_PER_TOKEN = 8
"""Characters that a prompt may have per token of the context: text has about four per token, code and white space up to
eight; what has more would not fit once it is tokenised."""
_LEAST = 1 << 14
"""Characters that are taken in any case: tokenising them costs nothing, and the message about ids is the better one."""


def check_text(characters: int, context: int, what: str) -> None:
    """Raise BadRequest for text that cannot fit into the context.

    Args:
        characters: Of the prompt.
        context: Tokens.
        what: What has so many, for the message.
    """
    allowed = max(CHARACTERS_PER_TOKEN * context, _LEAST)
    if characters > allowed:
        raise BadRequest(f"{what} has {characters} characters; allowed: {allowed}, for a context of {context} tokens")
