"""`--loss-mask-type`: THUDM/slime's ways of finding the assistant's text, as checks of ours.

The supervised rollout asks `apply_type` for every conversation. The masks are not made here. They follow from the chat
template (`demonstrations.py`); a type only says what they must agree with, and `distill_qwen` which turns count. Each
reads the rendered text by ChatML's marks, independently of the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from slime_commands.sft.demonstrations import STEP_LOSS_MASK, Message, Piece
from slime_core.data.tokenizer import render_messages
from slime_core.errors import DataError

AUTO = "auto"
DISTILL = "distill_qwen"
_TURN = re.compile(r"<\|im_start\|>assistant\n(?:<think>\n)?(.*?<\|im_end\|>)", re.DOTALL)
_ASKED: Message = {"role": "user", "content": "Begin."}


def apply_type(
    mask_type: str,
    tokenizer: Any,
    messages: Sequence[Message],
    pieces: Sequence[Piece],
    tools: Sequence[Message] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Piece]:
    """The pieces, once they agree with the type.

    `qwen`, `qwen3`: a turn is what the template writes for the message alone, after a user's. `qwen3_5`: turns are what
    stands between ChatML's marks in the text of the whole conversation. `distill_qwen`: only the last turn is trained.

    Raises:
        DataError: They do not agree; names the turn and the two texts.
    """
    if mask_type == AUTO:
        return list(pieces)
    turns = [piece for piece in pieces if piece.position >= 0]
    if mask_type == DISTILL:
        last = turns[-1].position
        return [p._replace(withheld=p.withheld or DISTILL) if 0 <= p.position != last else p for p in pieces]
    clean = [{k: v for k, v in m.items() if k != STEP_LOSS_MASK} for m in messages]
    kwargs = {**(template_kwargs or {}), "add_generation_prompt": False}
    if mask_type == "qwen3_5":
        expected = _TURN.findall(render_messages(tokenizer, clean, tools, kwargs))
    else:
        each = [render_messages(tokenizer, [_ASKED, clean[turn.position]], tools, kwargs) for turn in turns]
        expected = [found[-1] if (found := _TURN.findall(text)) else "" for text in each]
    if len(expected) != len(turns):
        raise DataError(
            f"--loss-mask-type {mask_type} finds {len(expected)} turns of the assistant's by ChatML's marks, and the"
            f" messages have {len(turns)}; type --loss-mask-type auto"
        )
    for turn, text in zip(turns, expected):
        if turn.trained and _without_prefix(turn.text) != _without_prefix(text):
            raise DataError(
                f"message {turn.position}: --loss-mask-type {mask_type} would train {text[:80]!r}, and what would be"
                f" sampled is {turn.text[:80]!r}; type --loss-mask-type auto for that"
            )
    return list(pieces)


def _without_prefix(turn: str) -> str:
    """A generation prompt may hold the opening of the thoughts, empty thoughts too."""
    return turn.removeprefix("<think>\n").lstrip("\n").removeprefix("</think>\n\n")
