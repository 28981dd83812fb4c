"""Parts that the parsers of all families share: reasoning, JSON, values without quotes."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_tool_parsers import MarkedParser, json_call, read_json, typed_value
from slime_tool_parsers.hermes import Hermes
from slime_tool_parsers.llama import Pythonic

from slime_core.tools import IllFormedCall, ToolCall, split_reasoning


@pytest.mark.parametrize(
    ("text", "opened", "split"),
    [
        ("42", False, ("", "42", False)),
        ("<think>a</think>b", False, ("a", "b", False)),
        (" <think>\na\n</think>\n\nb", False, ("a", "\n\nb", False)),
        ("a</think>b", False, ("a", "b", False)),  # the opening tag was in the prompt
        ("a</think>b", True, ("a", "b", False)),
        ("<think>a", False, ("a", "", True)),
        ("a", True, ("a", "", True)),
        ("<think></think>b", False, ("", "b", False)),
        ("quoted: <think>a</think>", False, ("", "quoted: <think>a</think>", False)),
        ("", False, ("", "", False)),
    ],
)
def test_reasoning(text: str, opened: bool, split: tuple[str, str, bool]) -> None:
    assert split_reasoning(text, opened=opened) == split


@given(st.text(), st.text(), st.booleans())
def test_reasoning_and_rest_are_parts_of_the_text(before: str, after: str, opened: bool) -> None:
    reasoning, rest, still_open = split_reasoning(before + after, opened=opened)
    assert reasoning in before + after
    assert rest in before + after
    assert not (still_open and rest)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("{", "not JSON"),
        ("NaN", "not JSON: NaN"),
        ("[" * 100_000, "not JSON: nested too deeply"),
        ("[1]", "a JSON object with a name"),
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": 3}', 'no "name"'),
        ('{"name": "f", "arguments": [1]}', "no JSON object"),
        ('{"name": "f", "arguments": "x"}', "the arguments are not JSON"),
    ],
)
def test_what_is_no_json_call(body: str, problem: str) -> None:
    attempt = json_call(body)
    assert isinstance(attempt, IllFormedCall)
    assert problem in attempt.problem
    assert attempt.text == body


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "arguments": {"a": 1}}',
        '{"name": "f", "parameters": {"a": 1}}',
        '{"name": "f", "arguments": "{\\"a\\": 1}"}',
    ],
)
def test_json_calls(body: str) -> None:
    assert json_call(body) == ToolCall("", "f", {"a": 1})


@given(st.text())
def test_reading_json_raises_nothing_but_value_errors(text: str) -> None:
    with contextlib.suppress(ValueError):
        read_json(text)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "integer"}, 5),
        ("5", {"type": "number"}, 5),
        ("5", {"type": "string"}, "5"),
        ('"5"', {"type": "string"}, '"5"'),
        ("true", {"type": "boolean"}, True),
        ("true", {"type": "string"}, "true"),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 5),
        ("[1]", {"type": "array"}, [1]),
        ("Oslo", {"type": "integer"}, "Oslo"),  # for the check of arguments to complain about
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"enum": [1, 2]}, 2),
        ("5", None, 5),
        ("5", {}, 5),
        ("Oslo", None, "Oslo"),
    ],
)
def test_values_take_their_types_from_the_schema(text: str, schema: dict[str, object] | None, value: object) -> None:
    found = typed_value(text, schema)
    assert (found, type(found)) == (value, type(value))


class _Bare(MarkedParser):
    begin, end, ends = "<c>", "</c>", ("<eos>",)

    def calls_in(self, body: str, tools: object) -> list[ToolCall | IllFormedCall]:
        return [json_call(body)]


def test_content_around_calls_is_kept_and_a_cut_call_is_reported() -> None:
    call = '<c>{"name": "f"}</c>'
    turn = _Bare().parse(f"<think>why</think>one {call} two {call} three <c>{{<eos>\n")
    assert (turn.reasoning, turn.content) == ("why", "one  two  three")
    assert turn.calls == [ToolCall("", "f", {})] * 2
    assert [bad.text for bad in turn.ill_formed] == ["{"]
    assert turn.attempts[2] is turn.ill_formed[0]


def test_calls_inside_unfinished_reasoning_are_none() -> None:
    turn = _Bare().parse('<think>I could <c>{"name": "f"}</c>')
    assert turn.reasoning_open
    assert not turn.attempts
    assert _Bare().parse('I could <c>{"name": "f"}</c>', reasoning_open=True).reasoning_open


def test_a_call_that_utf_8_cannot_hold_is_ill_formed() -> None:
    """JSON may escape half of a character; no client could be sent the call, and no tokenizer takes it."""
    said = ['{"name": "f", "arguments": {"a": ["\\ud83d"]}}', '{"name": "f", "arguments": {"a": "\\ud83d\\ude00"}}']
    turn = Hermes().parse("".join(f"<tool_call>{call}</tool_call>" for call in said))
    ill, well = turn.attempts
    assert isinstance(ill, IllFormedCall)
    assert ill.problem == "\\ud83d is half of a character"
    assert "\\ud83d" in ill.text
    assert well == ToolCall("", "f", {"a": "\U0001f600"})
    assert Pythonic().parse("[f(a='\\ud83d')]").ill_formed
