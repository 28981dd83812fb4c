"""Conversations -> pieces, under templates in the manner of five families, against texts put together by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slime_commands.sft.demonstrations import conversation_pieces
from slime_commands.sft.mask_types import apply_type
from slime_data.turns import turn_delta

from slime_core.errors import DataError
from slime_core.sample.provenance import Source
from tests.chat_tokenizers import FAMILIES, chat_tokenizer

Message = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
BY_FAMILY = pytest.mark.parametrize("family", sorted(FAMILIES))


def call(**arguments: Any) -> Message:
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}


def said(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


# -- what each family's assistant samples, written down without the templates ------------------------------


def written(c: Message) -> str:
    return json.dumps(c["function"]["arguments"], ensure_ascii=False)


def _thoughts(text: str) -> tuple[str, str]:
    thought, found, answer = text.partition("</think>")
    return (thought.removeprefix("<think>").strip(), answer.lstrip("\n")) if found else ("", text)


def _qwen25(m: Message, ends_with: str) -> str:
    calls = "".join(
        '\n<tool_call>\n{"name": "add", "arguments": ' + written(c) + "}\n</tool_call>" for c in m.get("tool_calls", ())
    )
    return m["content"] + calls + "<|im_end|>"


def _qwen3(m: Message, ends_with: str) -> str:
    thought, answer = _thoughts(m["content"])
    return f"<think>\n{thought}\n</think>\n\n" + _qwen25({**m, "content": answer}, ends_with)


def _llama3(m: Message, ends_with: str) -> str:
    if m.get("tool_calls"):
        (only,) = m["tool_calls"]
        return '{"name": "add", "parameters": ' + written(only) + "}<|eot_id|>"
    return m["content"].strip() + "<|eot_id|>"


def _glm4(m: Message, ends_with: str) -> str:
    calls = "".join("\nadd\n" + written(c) for c in m.get("tool_calls", ()))
    return m["content"] + calls + ends_with


def _deepseek(m: Message, ends_with: str) -> str:
    calls = "".join("<|call|>add\n" + written(c) + "<|/call|>" for c in m.get("tool_calls", ()))
    return m["content"] + calls + "<EOS>"


SAMPLED: dict[str, Callable[[Message, str], str]] = {
    "qwen2.5": _qwen25,
    "qwen3": _qwen3,
    "llama3": _llama3,
    "glm4": _glm4,
    "deepseek": _deepseek,
}
NEXT = {"user": "<|user|>", "tool": "<|observation|>", "system": "<|system|>", "assistant": "<|assistant|>"}
REWRITE_HISTORY = ("qwen3", "deepseek")


def expected_turns(family: str, messages: list[Message]) -> list[str]:
    turns = []
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            after = (
                messages[at + 1]["role"] if at + 1 < len(messages) else "tool" if "tool_calls" in message else "user"
            )
            turns.append(SAMPLED[family](message, NEXT[after]))
    return turns


def decoded(family: str, ids: list[int]) -> str:
    return str(chat_tokenizer(family).decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def plain(messages: list[Message]) -> list[Message]:
    return [{k: v for k, v in m.items() if k != "step_loss_mask"} for m in messages]


# -- properties ------------------------------------------------------------------------------------------

letters = st.text(st.sampled_from('abcthe in1.{"\\\n?\u00e9\u4f60<'), min_size=1, max_size=10)
words = letters.map(str.strip).filter(bool)
arguments = st.dictionaries(st.sampled_from("ab"), st.one_of(st.integers(0, 99), words), min_size=1, max_size=2)
masks = st.sampled_from([None, None, 0, 1])


@st.composite
def chats(draw: st.DrawFn, family: str) -> list[Message]:
    messages = [said("system", draw(words))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(said("user", draw(words)))
        for _ in range(draw(st.integers(0, 2))):
            calls = 1 if family == "llama3" else draw(st.integers(1, 2))
            text = "" if family == "llama3" or draw(st.booleans()) else draw(words)
            turn = said("assistant", text, tool_calls=[call(**draw(arguments)) for _ in range(calls)])
            messages += [turn, *(said("tool", draw(words), name="add", tool_call_id="c1") for _ in range(calls))]
        text = draw(words)
        if family == "qwen3" and draw(st.booleans()):
            text = f"<think>\n{draw(words)}\n</think>\n\n{text}"
        messages.append(said("assistant", text))
    for message in messages:
        mask = draw(masks) if message["role"] == "assistant" else None
        if mask is not None:
            message["step_loss_mask"] = mask
    return messages


@BY_FAMILY
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_the_demonstrations_are_exactly_the_assistants_turns(family: str, data: st.DataObject) -> None:
    messages, tools = data.draw(chats(family)), data.draw(st.sampled_from([None, TOOLS]))
    pieces = conversation_pieces(chat_tokenizer(family), messages, tools)
    turns = [piece for piece in pieces if piece.position >= 0]
    expected = expected_turns(family, messages)
    assert [decoded(family, turn.ids) for turn in turns] == expected == [turn.text for turn in turns]
    spoken = [m for m in messages if m["role"] == "assistant"]
    assert [t.withheld for t in turns] == ["step_loss_mask" if m.get("step_loss_mask") == 0 else "" for m in spoken]
    assert all(p.source != Source.SAMPLED and (p.position >= 0) == (p.source == Source.DEMONSTRATION) for p in pieces)
    whole = chat_tokenizer(family).apply_chat_template(plain(messages), tools=tools, tokenize=False)
    text = decoded(family, [token for piece in pieces for token in piece.ids])
    if family not in REWRITE_HISTORY:
        # Where the whole text is defined, the mask is the one of characters: its turns stand one after the other in it.
        assert text.removesuffix("<|user|>") == whole
        position = 0
        for turn in expected:
            position = (whole + "<|user|>").index(turn, position) + len(turn)
    else:
        assert text.endswith(expected[-1] + ("\n" if family == "qwen3" else ""))


@BY_FAMILY
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_the_ids_are_those_of_multi_turn_generation(family: str, data: st.DataObject) -> None:
    """The same turns, sampled: prompt, turn, turn_delta, turn, ... give the same ids."""
    from slime_core.data.tokenizer import encode_rendered, render_prompt

    tokenizer, messages = chat_tokenizer(family), plain(data.draw(chats(family)))
    texts = expected_turns(family, messages)
    at = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    ids = encode_rendered(tokenizer, render_prompt(tokenizer, messages[: at[0]], TOOLS))
    for number, (position, text) in enumerate(zip(at, texts)):
        turn = encode_rendered(tokenizer, text)
        ids += turn
        if number + 1 < len(at):
            new = messages[position + 1 : at[number + 1]]
            for more, _ in turn_delta(
                tokenizer, None, messages[:position], new, tools=TOOLS, sampled_ids=turn, assistant=messages[position]
            ):
                ids += more
    pieces = conversation_pieces(tokenizer, messages, TOOLS)
    assert [token for piece in pieces for token in piece.ids][: len(ids)] == ids


# -- cases -----------------------------------------------------------------------------------------------

RULES, ASK, AGAIN = said("system", "Be brief."), said("user", "What is 1+2?"), said("user", "Thanks!")
CALLS = said("assistant", "", tool_calls=[call(a=1, b=2)])
RESULTS = [said("tool", "three", name="add", tool_call_id="c1"), said("tool", "exactly", name="add", tool_call_id="c1")]
DONE = said("assistant", "It is 3.")


@pytest.mark.parametrize(
    ("family", "message", "problem"),
    [
        ("deepseek", said("assistant", "<think>Hm, two.</think>It is 3."), "text 'Hm, two.' is not in what"),
        ("llama3", said("assistant", "Let me see.", tool_calls=[call(a=1)]), "text 'Let me see.' is not in what"),
        ("llama3", said("assistant", "x", reasoning_content="Hm."), "reasoning 'Hm.' is not in what"),
    ],
)
def test_what_a_template_leaves_out_is_an_error(family: str, message: Message, problem: str) -> None:
    with pytest.raises(DataError, match=f"message 1: the assistant's {problem}"):
        conversation_pieces(chat_tokenizer(family), [ASK, message])
    # As the message advises: what is no more than context need not be all of it.
    pieces = conversation_pieces(chat_tokenizer(family), [ASK, {**message, "step_loss_mask": 0}, AGAIN, DONE])
    assert [(p.position, p.trained) for p in pieces if p.position >= 0] == [(1, False), (3, True)]


def _with_template(family: str, old: str, new: str) -> Any:
    import copy

    tokenizer = copy.copy(chat_tokenizer(family))
    assert old in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    return tokenizer


def test_calls_that_a_template_leaves_out_or_changes_are_an_error() -> None:
    silent = _with_template("qwen2.5", "message.tool_calls or []", "[]")
    with pytest.raises(DataError, match="message 1: the assistant's tool call 'add' is not in what"):
        conversation_pieces(silent, [ASK, CALLS, RESULTS[0], DONE])
    changed = _with_template("qwen2.5", "call.function.arguments | tojson", "'{}'")
    with pytest.raises(DataError, match="message 1: the assistant's argument '1' is not in what"):
        conversation_pieces(changed, [ASK, CALLS, RESULTS[0], DONE])


def test_what_a_template_adds_to_a_turn_is_an_error() -> None:
    begin = "'<|im_start|>assistant\\n' + (message.content or '')"
    chatty = _with_template("qwen2.5", begin, begin.replace("+", "+ '<|endoftext|>Well.<|endoftext|>' +"))
    with pytest.raises(
        DataError, match=r"the chat template writes 'Well\.' in the assistant's turn, and the message does"
    ):
        conversation_pieces(chatty, [ASK, DONE])
    chatty = _with_template("qwen2.5", begin, begin + " + ' Bye.'")
    with pytest.raises(DataError, match=r"the assistant's text 'It is 3\.' is not in what .* 'It is 3. Bye"):
        conversation_pieces(chatty, [ASK, DONE])


def test_what_a_template_adds_to_a_turn_with_calls_is_an_error() -> None:
    """Only what it writes for any such calls is its notation."""
    chat = [ASK, said("assistant", "Let me see.", tool_calls=[call(a=1, b="two")]), RESULTS[0], DONE]
    conversation_pieces(chat_tokenizer("qwen2.5"), chat)
    first = "message.tool_calls[0].function.arguments"
    asked = "call.function.arguments | tojson"
    end = "{{- '<|im_end|>\\n' }}"
    for old, new in (
        (end, "{{- ' Bye.' if message.tool_calls and 'see' in message.content }}" + end),
        (end, f"{{{{- ' Bye.' if message.tool_calls and {first}.a == 1 }}}}{end}"),
        (asked, "{'a': 7 if call.function.arguments.a == 1 else 8, 'b': 'two 1'} | tojson"),  # all words, none in place
    ):
        with pytest.raises(DataError, match=r"message 1: the chat template writes .* around the words of such a turn"):
            conversation_pieces(_with_template("qwen2.5", old, new), chat)


def test_a_tokenizer_that_loses_text_is_an_error() -> None:
    import copy

    from tokenizers import normalizers

    lossy = copy.deepcopy(chat_tokenizer("qwen2.5"))
    lossy.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(DataError, match=r"message 1: the tokenizer does not give back .* 'It is 3.* becomes 'it is 3"):
        conversation_pieces(lossy, [ASK, DONE])


def test_rows_that_are_no_conversation_to_learn_from() -> None:
    tokenizer = chat_tokenizer("qwen2.5")
    with pytest.raises(DataError, match="no message of the assistant's"):
        conversation_pieces(tokenizer, [ASK])
    with pytest.raises(DataError, match="message 0 is the assistant's"):
        conversation_pieces(tokenizer, [DONE, ASK, DONE])
    for mask in ("no", 0.5, 2, float("nan")):
        with pytest.raises(DataError, match=f"message 1: step_loss_mask is {mask!r}"):
            conversation_pieces(tokenizer, [ASK, {**DONE, "step_loss_mask": mask}])


# -- --loss-mask-type --------------------------------------------------------------------------------------


def typed(kind: str, family: str, messages: list[Message]) -> list[str]:
    pieces = conversation_pieces(chat_tokenizer(family), messages)
    return [p.text for p in apply_type(kind, chat_tokenizer(family), messages, pieces) if p.trained]


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5"])
def test_types_that_agree(kind: str) -> None:
    chat = [RULES, ASK, CALLS, *RESULTS, DONE, AGAIN, {**DONE, "step_loss_mask": 0}, AGAIN, DONE]
    assert typed(kind, "qwen2.5", chat) == typed("auto", "qwen2.5", chat)
    assert typed(kind, "qwen3", [ASK, DONE]) == ["<think>\n\n</think>\n\nIt is 3.<|im_end|>"]


def test_types_that_do_not_agree() -> None:
    thought = said("assistant", "<think>\nOne more.\n</think>\n\nIt is 3.")
    chat = [ASK, thought, AGAIN, DONE]
    assert typed("qwen3", "qwen3", chat) == typed("auto", "qwen3", chat)
    with pytest.raises(DataError, match=r"message 1: --loss-mask-type qwen3_5 would train 'It is 3.*auto"):
        typed("qwen3_5", "qwen3", chat)
    with pytest.raises(DataError, match="--loss-mask-type qwen3_5 finds 0 turns of the assistant's by ChatML's marks"):
        typed("qwen3_5", "llama3", [*chat[:1], DONE])


def test_templates_that_take_arguments_as_text_only_get_them_so() -> None:
    strict = _with_template(
        "deepseek", "(call.function.arguments | tojson)", "call.function.arguments"
    )  # fmt: skip
    as_text = said(
        "assistant", "", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}]
    )
    pieces = conversation_pieces(strict, [ASK, as_text, RESULTS[0], DONE])
    assert next(p.text for p in pieces if p.position == 1) == '<|call|>add\n{"a":1}<|/call|><EOS>'
