from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_commands.init.tiny_model import SPECIAL_TOKENS, write_tokenizer

from slime_core.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    assert write_tokenizer(directory) == 272
    return load_tokenizer(directory)


@pytest.mark.slow
@given(st.text(max_size=60))
def test_every_text_survives(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_stand_alone_and_fixed_words_are_one_token(tokenizer: Any) -> None:
    tokens = tokenizer.tokenize(r"7+8=15 \boxed{85}")
    assert tokens == ["7", "+", "8", "=", "1", "5", "\u0120\\boxed{", "8", "5", "}"]
    assert tokenizer.tokenize("37+48=?") == ["3", "7", "+", "4", "8", "=?"]
    assert tokenizer.tokenize(r"\boxed{") == [r"\boxed{"]


def test_special_tokens_are_never_split_and_are_known_to_transformers(tokenizer: Any) -> None:
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.encode("".join(SPECIAL_TOKENS), add_special_tokens=False) == list(range(len(SPECIAL_TOKENS)))
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|end|>")
    assert tokenizer.decode([1], skip_special_tokens=True) == ""


def test_the_template_costs_three_tokens(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "1+1=?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|user|>1+1=?<|end|><|assistant|>"
    assert len(tokenizer.encode(text)) == len(tokenizer.encode("1+1=?")) + 3
