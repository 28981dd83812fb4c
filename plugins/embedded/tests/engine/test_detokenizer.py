from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from slime_embedded.engine.sampling_params import SamplingParams
from slime_embedded.engine.sequence import TextStream, decode


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(byte_tokenizer)


def feed(tokenizer: Any, text: str, *stop: str) -> tuple[TextStream, list[str], str | None]:
    stream = TextStream(tokenizer, SamplingParams(stop=stop))
    ids, shown = tokenizer.encode(text), []
    for n in range(1, len(ids) + 1):
        match = stream.update(ids[:n], final=n == len(ids))
        shown.append(stream.safe_text)
        if match is not None:
            return stream, shown, match
    return stream, shown, None


@pytest.mark.parametrize("text", ["plain", "gr\u00fc\u00dfe \u4f60\u597d \U0001f600!", "a<|end|>b", "  two  spaces "])
def test_the_stream_ends_with_the_whole_text_and_never_takes_back(tokenizer: Any, text: str) -> None:
    stream, shown, match = feed(tokenizer, text)
    assert match is None
    assert stream.text == decode(tokenizer, tokenizer.encode(text), SamplingParams())
    for earlier, later in itertools.pairwise(shown):
        assert later.startswith(earlier)
        assert "\ufffd" not in later


def test_broken_characters_are_shown_at_the_end_only(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, SamplingParams())
    ids = tokenizer.encode("\u4f60")[:2]
    assert stream.update(ids) is None
    assert stream.text == ""
    stream.update(ids, final=True)
    assert "\ufffd" in stream.text


def test_the_first_stop_string_wins_and_its_beginning_is_held_back(tokenizer: Any) -> None:
    stream, shown, match = feed(tokenizer, "one STOP two END", "END", "STOP", "TOPX")
    assert match == "STOP"
    assert stream.stop_at == 4
    assert stream.text[: stream.stop_at] == "one "
    assert all("S" not in text for text in shown[:-1])
    _, shown, match = feed(tokenizer, "one STO two", "STOP")
    assert match is None
    assert shown[-1] == "one STO two"
