"""What is appended between sampled turns, for templates in the manner of five model families."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_data.turns import turn_delta

from slime_core.data.tokenizer import render_messages, render_prompt
from slime_core.data.turns import rendered_spans
from slime_core.errors import DataError
from slime_core.sample.provenance import Source
from tests.chat_tokenizers import FAMILIES, chat_tokenizer

ASK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 1?"},
]
TOOLS = [{"role": "tool", "content": "forty"}, {"role": "tool", "content": "two"}]


def text_of(family: str, pieces: list[tuple[list[int], Source]]) -> str:
    return "".join(chat_tokenizer(family).decode(ids) for ids, _ in pieces)


def ids_of(family: str, text: str) -> list[int]:
    found: list[int] = chat_tokenizer(family).encode(text, add_special_tokens=False)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("new", [[{"role": "user", "content": "Sure?"}], TOOLS])
def test_prompt_turn_and_delta_are_the_templates_text(family: str, new: list[dict[str, Any]]) -> None:
    """Where the template does not rewrite the turn, which Qwen3's does."""
    tokenizer = chat_tokenizer(family)
    turn = "It is 2."
    delta = turn_delta(tokenizer, None, ASK, new, sampled_ids=ids_of(family, turn))
    written = render_prompt(tokenizer, ASK) + turn + text_of(family, delta)
    whole = render_messages(
        tokenizer, [*ASK, {"role": "assistant", "content": turn}, *new], None, {"add_generation_prompt": True}
    )
    assert written == whole
    words = [(tokenizer.decode(ids), source) for ids, source in delta if source != Source.TEMPLATE]
    assert words == [(m["content"], Source.TOOL if m["role"] == "tool" else Source.USER) for m in new]


@pytest.mark.parametrize(
    ("family", "sampled", "rest"),
    [
        ("qwen2.5", "2", "<|im_end|>\n<|im_start|>user\nSure?"),
        ("qwen2.5", "2<|im_end|>", "\n<|im_start|>user\nSure?"),
        ("qwen2.5", "2<|im_end|>\n", "<|im_start|>user\nSure?"),
        ("qwen2.5", "2<|endoftext|>", "<|im_end|>\n<|im_start|>user\nSure?"),
        ("llama3", "2<|eot_id|>", "<|start_header_id|>user<|end_header_id|>\n\nSure?"),
        ("glm4", "2", "<|user|>\nSure?"),
        ("glm4", "2<|user|>", "\nSure?"),
        ("glm4", "2<|observation|>", "<|user|>\nSure?"),
        ("deepseek", "2<EOS>", "<|User|>Sure?"),
    ],
)
def test_what_the_model_sampled_of_the_turns_end_is_not_repeated(family: str, sampled: str, rest: str) -> None:
    new = [{"role": "user", "content": "Sure?"}]
    delta = turn_delta(chat_tokenizer(family), None, ASK, new, sampled_ids=ids_of(family, sampled))
    assert text_of(family, delta).startswith(rest)


_PLAIN = "{{ m.role }}: {{ m.content }}"
_EACH = (
    "{% for m in messages %}{% set outer = loop %}<|im_start|>"
    "TURN"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
_POSITION = _PLAIN + "{% if loop.index0 > 2 or not loop.last %} END {% endif %}"
"""Ends its first turn only once something follows."""
_COUNTED = "{{ m.role }} {{ loop.index }} of {{ messages | length }}: {{ m.content }}<|im_end|>\n"
_LAST_BLANK = _PLAIN + "<|im_end|>{{ '' if loop.last else '\n' }}"
_LAST_OTHER = _PLAIN + "{{ '<|im_end|><last>' if loop.last else '<|im_end|><more>' }}"


@pytest.mark.parametrize(
    ("template", "sampled"),
    [
        (_POSITION, "fine END "), (_POSITION, "fine"), (_COUNTED, "fine<|im_end|>"), (_COUNTED, "fine"),
        (_COUNTED, "fine<|im_end|>\n"), (_LAST_BLANK, "fine<|im_end|>"), (_LAST_BLANK, "fine"),
        (_LAST_OTHER, "fine<|im_end|>"),
    ],
)  # fmt: skip
def test_templates_that_look_where_a_turn_is_are_followed_to_the_letter(template: str, sampled: str) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer("qwen2.5"))
    tokenizer.chat_template = _EACH.replace("TURN", template)
    answer = {"role": "assistant", "content": "fine"}
    history, new = [*ASK, {"role": "assistant", "content": "so"}, ASK[1]], [{"role": "user", "content": "Sure?"}]
    for before in (history, history * 2):
        delta = turn_delta(tokenizer, None, before, new, sampled_ids=ids_of("qwen2.5", sampled))
        whole = render_messages(tokenizer, [*before, answer, *new], None, {"add_generation_prompt": True})
        assert whole.endswith("fine" + (sampled + text_of("qwen2.5", delta)).removeprefix("fine"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}|{% endif %}{% endfor %}", "0 times"),
        ("{% for m in messages %}{{ m.content + m.content }}|{% endfor %}", "2 times"),
        (
            "{% for m in messages %}{{ m.content }}{{ '<last>' if loop.last else '<more>' }}{% endfor %}",
            "ends a turn with '<last>' while it is the last, and then '<more>",
        ),
        ("{% for m in messages %}{{ raise_exception('no ' + m.role) }}{% endfor %}", "refuses the messages"),
    ],
)
def test_a_template_without_a_defined_delta_is_named(template: str, message: str) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer("qwen2.5"))
    tokenizer.chat_template, tokenizer.name_or_path = template, "models/odd"
    with pytest.raises(DataError, match=message) as caught:
        turn_delta(tokenizer, None, ASK, [{"role": "user", "content": "Sure?"}])
    assert "refuses" in message or "the chat template of models/odd" in str(caught.value)


TEXT = st.text(st.sampled_from("ab 1\n\u00e9<|>user"), max_size=12)


@given(st.sampled_from(sorted(FAMILIES)), TEXT, TEXT, TEXT)
def test_sources_of_any_words(family: str, system: str, user: str, tool: str) -> None:
    """Ids are those of the rendered text, and each message's words are its own, as far as tokens can tell."""
    tokenizer = chat_tokenizer(family)
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
        {"role": "assistant", "content": "yes"},
        {"role": "tool", "content": tool},
    ]
    text = render_prompt(tokenizer, messages)
    ids, spans = rendered_spans(tokenizer, messages, text)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert sum(span.length for span in spans) == len(ids)
    start = 0
    for source, length, withheld in spans:
        words = tokenizer.decode(ids[start : start + length])
        start += length
        assert bool(withheld) == (source == Source.DEMONSTRATION)
        if source == Source.USER:
            assert user.strip() in words
        if source == Source.DEMONSTRATION:
            assert "yes" in words
    told = {span.source for span in spans}
    assert (Source.USER in told) == bool(user.strip()) or user.isspace()
