"""Prompts of long conversations, with templates in the manner of five model families."""

from __future__ import annotations

from typing import Any

import pytest
from slime_agent_base_url import prompts
from slime_agent_base_url.prompts import PromptWriter
from slime_agent_base_url.tree import MessageTree, Prompt, Turn
from slime_serving.front.wanted import Message

from slime_core import GenerationOutput
from tests.chat_tokenizers import FAMILIES, chat_tokenizer

TURNS = 12


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_end_of_a_long_conversation_becomes_ids(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And drift is counted as if all of it did, where the template strips earlier reasoning, too."""
    tokenizer, tree = chat_tokenizer(family), MessageTree(rewrite_threshold=1024)
    writer, made, encoded = PromptWriter(tokenizer), list[Prompt](), list[int]()
    encode = prompts.encode_rendered

    def counting(tokenizer: Any, text: str) -> list[int]:
        encoded.append(len(text))
        return encode(tokenizer, text)

    monkeypatch.setattr(prompts, "encode_rendered", counting)
    messages: list[Message] = [{"role": "system", "content": "word " * 100}, {"role": "user", "content": "begin"}]
    for number in range(TURNS):
        place = tree.find(messages)
        prompt = writer.prompt(messages, [], place)
        assert prompt.rendering is not None
        assert prompt.rendering.ids == encode(tokenizer, prompt.rendering.text)
        assert prompt.drifted == (prompt.ids != prompt.rendering.ids)
        made.append(prompt)
        text = f"<think>\nso {number}\n</think>\n\nanswer {number}" if number % 3 == 1 else f"answer {number}"
        ids = encode(tokenizer, text + tokenizer.eos_token)
        meta = {"finish_reason": {"type": "stop"}}
        answer = {"role": "assistant", "content": f"answer {number}"}
        turn = Turn(prompt, GenerationOutput(ids, [-0.5] * len(ids), text, meta))
        tree.add(place, messages, answer, turn)
        role = "user" if number % 2 else "tool"
        messages = [*messages, answer, {"role": role, "content": f"{number}, then?"}]
    assert len(encoded) == TURNS
    assert encoded[0] > 500
    assert max(encoded[1:]) < 200, "the end alone"
    assert [prompt.rendering is not None for prompt in made] == [False] * (TURNS - 1) + [True], "kept once"
    assert all(not prompt.begun for prompt in made[1:]), "a turn keeps what no earlier one has"
