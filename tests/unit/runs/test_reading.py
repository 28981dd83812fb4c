"""Readable forms of a stored sample."""

from __future__ import annotations

from typing import Any

import pytest
from slime_runs.reading import question
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

WORDS = {word: i for i, word in enumerate(["[U]", "[A]", "two", "sums", "again", "four"])}
CHAT: dict[str, Any] = {
    "prompt": "[U] two sums [A]", "tokens": [0, 2, 3, 1, 5, 0, 4],
    "spans": [["template", 1], ["user", 2], ["template", 1], ["sampled", 1], ["template", 1], ["user", 1]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "known", "asked"),
    [
        (CHAT, True, "two sums"),
        (CHAT, False, "[U] two sums [A]"),
        ({**CHAT, "spans": [["text", 4], ["sampled", 1]]}, True, "[U] two sums [A]"),
        (
            {"prompt": [{"role": "system", "content": "be short"}, {"role": "user", "content": "two sums"}]},
            True,
            "two sums",
        ),
        ({"prompt": [{"content": [{"type": "image"}, {"type": "text", "text": "what"}]}]}, True, "[image]what"),
        ({"prompt": None}, True, ""),
    ],
)
def test_a_question_is_the_newest_message_before_the_answer(row: dict[str, Any], known: bool, asked: str) -> None:
    assert question(row, Tokenizer(WordLevel(WORDS, unk_token="[U]")) if known else None) == asked
