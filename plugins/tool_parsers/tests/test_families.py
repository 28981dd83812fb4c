"""Calls as each model family writes them; every parser against the contract of its kind."""

from __future__ import annotations

import keyword
from typing import Any, ClassVar

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slime_serving.front.answer import LiveText, TurnReader
from slime_testing_contracts import ToolParserContract
from slime_tool_parsers import ToolParserBase
from slime_tool_parsers.deepseek import SEPARATOR, DeepSeekV3, DeepSeekV31
from slime_tool_parsers.glm import Glm4, Glm45
from slime_tool_parsers.hermes import Hermes
from slime_tool_parsers.kimi import KimiK2
from slime_tool_parsers.llama import Llama3, Pythonic
from slime_tool_parsers.mistral import Mistral, MistralNamed
from slime_tool_parsers.plain import Plain
from slime_tool_parsers.xml_values import MiniMaxM2, Qwen3Coder

from slime_core.tools import ToolCall

BAR, GAP = "\uff5c", "\u2581"


def deepseek(words: str) -> str:
    return f"<{BAR}{words.replace(' ', GAP)}{BAR}>"


CALL, END, SEP = deepseek("tool call begin"), deepseek("tool call end"), deepseek("tool sep")


class TestHermes(ToolParserContract):
    component = "hermes"
    chat_template = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    ill_formed = ("<tool_call>{</tool_call>", '<tool_call>{"name": "weather"}', "<tool_call>[1]</tool_call>")


class TestQwen(TestHermes):
    component = "qwen"


class TestQwen3Coder(ToolParserContract):
    component = "qwen3_coder"
    chat_template = "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>"
    ill_formed = (
        "<tool_call>weather</tool_call>",
        "<tool_call><function=></function></tool_call>",
        "<tool_call><function=weather><parameter=city>Oslo",
        "<tool_call><function=weather>Oslo</function></tool_call>",
        "<tool_call><function=weather>",
    )


class TestMiniMaxM2(ToolParserContract):
    component = "minimax_m2"
    chat_template = '<minimax:tool_call>\n<invoke name="tool-name">'
    ill_formed = ("<minimax:tool_call></minimax:tool_call>", '<minimax:tool_call><invoke name="weather">')


class TestGlm45(ToolParserContract):
    component = "glm45"
    chat_template = "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<|observation|>"
    ill_formed = (
        "<tool_call><arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>",
        "<tool_call>weather<arg_key>city</arg_key></tool_call>",
        "<tool_call>weather",
    )


class TestGlm4(ToolParserContract):
    component = "glm4"
    chat_template = "<|observation|>"
    ill_formed = ('weather\n{"city": ', "weather\n{city}<|observation|>")


class TestDeepSeekV3(ToolParserContract):
    component = "deepseek_v3"
    chat_template = f"{CALL}' + tool['type'] + '{SEP}' + tool['function']['name'] + '\\n' + '```json"
    ill_formed = (f"{CALL}weather{END}", f"{CALL}function{SEP}weather\n```json\n{{\n```{END}", f"{CALL}function{SEP}")


class TestDeepSeekV31(ToolParserContract):
    component = "deepseek_v31"
    chat_template = f"{CALL}' + tool['function']['name'] + '{SEP}"
    ill_formed = (f"{CALL}weather{END}", f"{CALL}weather{SEP}{{{END}", f"{CALL}{SEP}{{}}{END}")


class TestKimiK2(ToolParserContract):
    component = "kimi_k2"
    chat_template = "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>"
    ill_formed = (
        "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{<|tool_call_end|>",
        "<|tool_call_begin|>3<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_call_begin|>functions.weather:0<|tool_call_end|>",
    )


class TestLlama3(ToolParserContract):
    component = "llama3"
    chat_template = '<|start_header_id|>{"name": function name, "parameters": dictionary}'
    ill_formed = ("<|python_tag|>", '{"name": "weather", "parameters": {', "<|python_tag|>print(1)")


class TestMistral(ToolParserContract):
    component = "mistral"
    chat_template = "{{- '[TOOL_CALLS] [' }}{{- out + ', id: ' + tool_call.id }}"
    ill_formed = (
        "[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "weather", "argum', "[TOOL_CALLS] weather", "[TOOL_CALLS][]",
        '[TOOL_CALLS]weather[ARGS]{"city": ',
    )  # fmt: skip


class TestMistralNamed(TestMistral):
    component = "mistral_named"
    chat_template = "{{- '[TOOL_CALLS]' + tool.function.name + '[ARGS]' + arguments }}"


class TestPythonic(ToolParserContract):
    component = "pythonic"
    chat_template = "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]"
    ill_formed = ('[weather(city="Oslo")', '[weather("Oslo")]', "[weather(city=Oslo)]", "[weather(**{})]", "[f(1)(2)]")


class TestPlain(ToolParserContract):
    component = "plain"
    chat_template = "write <tool>expression</tool>"
    tools: ClassVar[Any] = (
        {
            "type": "function",
            "function": {
                "name": "calculator",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string"}},
                    "required": ["expression"],
                },
            },
        },
    )
    calls = (ToolCall("", "calculator", {"expression": "1+1"}), ToolCall("", "calculator", {"expression": " 2 "}))


NAMED = [
    Hermes, Qwen3Coder, MiniMaxM2, Glm45, Glm4, DeepSeekV3, DeepSeekV31, KimiK2, Llama3, Mistral, MistralNamed,
    Pythonic,
]  # fmt: skip
WHOLE_TURN = (Llama3, Glm4)
"""Forms in which a call without a marker is the whole turn."""
REST_OF_TURN = (*WHOLE_TURN, Pythonic, Plain)
"""Forms whose calls nothing may follow."""

MARKS = [
    "<tool_call>", "</tool_call>", "<function=a>", "</function>", "<parameter=b>", "</parameter>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="a">',
    "</invoke>", '<parameter name="b">', "<think>", "</think>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]",
    "</s>", "<|im_end|>", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "<|assistant|>", "<|observation|>",
    "[e~[", "```json", "```", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>", "<|eot_id|>",
    DeepSeekV3.begin, DeepSeekV3.end, SEPARATOR, *"\"'\\{}[]();0 \n\r\u2028\x85", "None", "true", "NaN",
]  # fmt: skip
"""Text that means something to one of the forms, for values to hold."""
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
PIECES = st.sampled_from(MARKS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
TEXT = st.lists(PIECES, max_size=6).map("".join)
PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=20)
VALUES = st.recursive(
    SCALARS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,10}", fullmatch=True) | st.sampled_from(["from", "class", "true", "null"])
TOOL_NAMES = NAMES.filter(lambda name: not keyword.iskeyword(name))


def schemas(calls: list[ToolCall]) -> list[dict[str, Any]]:
    """Schemas that say of every parameter whether it is text: what a form without quotes needs to know."""
    parameters: dict[str, dict[str, Any]] = {}
    for call in calls:
        assert isinstance(call.arguments, dict)
        properties = parameters.setdefault(call.name, {})
        for key, value in call.arguments.items():
            properties[key] = {"type": "string"} if isinstance(value, str) else {"type": _type(value)}
    return [
        {"type": "function", "function": {"name": n, "parameters": {"type": "object", "properties": p}}}
        for n, p in parameters.items()
    ]


def _type(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


@st.composite
def some_calls(draw: st.DrawFn) -> list[ToolCall]:
    names = draw(st.lists(TOOL_NAMES, min_size=1, max_size=3, unique=True))
    return [ToolCall("", name, draw(st.dictionaries(NAMES, VALUES, max_size=3))) for name in names]


@pytest.mark.parametrize("parser", NAMED, ids=lambda p: p.__name__)
@settings(max_examples=8, deadline=None)
@given(calls=some_calls(), before=st.sampled_from(["", "I look it up.\n", "<think>hm</think>\n"]))
def test_what_is_written_is_read(parser: type[ToolParserBase], calls: list[ToolCall], before: str) -> None:
    if parser in WHOLE_TURN and not before.startswith("<"):
        before = ""
    turn = parser().parse(before + parser().render(calls) + (parser.ends[0] if parser.ends else ""), schemas(calls))
    assert [(call.name, call.arguments) for call in turn.calls] == [(call.name, call.arguments) for call in calls]
    assert turn.ill_formed == []
    assert turn.content + (f"<think>{turn.reasoning}</think>" if turn.reasoning else "") == before.strip()


@given(st.lists(PLAIN_TEXT, min_size=1, max_size=3))
def test_the_plain_form_is_read(expressions: list[str]) -> None:
    schema = schemas([ToolCall("", "calc", {"x": ""})])
    calls = [ToolCall("", "calc", {"x": expression}) for expression in expressions]
    assert Plain().parse("So " + Plain().render(calls) + "<|end|>", schema).calls == calls


PROSE = st.text("abc <[{.\n\"'", max_size=12) | st.sampled_from(
    ["I look it up.\n", "use <tool_call> tags", "the <function=zzz> tag", '{"name": "Bob", "age": 3}', '{"a": 1} ok',
     "[1, 2] is a list", "weather\nis fine"],
)  # fmt: skip


@pytest.mark.parametrize("parser", [*NAMED, Plain], ids=lambda p: p.__name__)
@settings(max_examples=5, deadline=None)
@given(calls=some_calls(), prose=st.tuples(PROSE, PROSE), thought=st.booleans(), step=st.sampled_from([1, 2, 7]))
def test_what_streams_is_what_is_read(
    parser: type[ToolParserBase], calls: list[ToolCall], prose: tuple[str, str], thought: bool, step: int
) -> None:
    """A server's growing answer, and the whole one."""
    before, after = prose
    if parser is Plain:
        calls = [ToolCall("", "calc", {"x": "1+1" * 90})]
    written = parser().render(calls)
    if parser in REST_OF_TURN:
        after = ""
        assume(thought or "</think>" not in written)  # behind words it is no call, and the tag ends reasoning
    text = ("<think>is 3 < [4]?</think>\n" if thought else "") + before + written + after
    reader = TurnReader(None, parser())
    whole = reader.parse(text, schemas(calls), False)
    live = LiveText(reader, schemas(calls), False, [])
    pieces = [live.grow(text[:end]) for end in [*range(step, len(text), step), len(text)]]
    pieces.append(live.finish(whole.content, whole.reasoning))
    assert tuple("".join(part) for part in zip(*pieces)) == (whole.reasoning, whole.content)


TURNS = [
    (
        Hermes,
        '<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
        '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>',
        [("f", {"a": "x"}), ("g", {})],
        "Let me see.",
    ),
    (
        Qwen3Coder,
        "Reading.\n<tool_call>\n<function=f>\n<parameter=a>\ntwo\nlines\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>",
        [("f", {"a": "two\nlines", "n": 3})],
        "Reading.",
    ),
    (
        Glm45,
        "<think>x</think>\nok\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x y</arg_value>\n</tool_call>"
        "<|observation|>",
        [("f", {"a": "x y"})],
        "ok",
    ),
    (Glm45, "<tool_call>f<arg_key>n</arg_key><arg_value>3</arg_value></tool_call>", [("f", {"n": 3})], ""),
    (Glm4, '\nf\n{"a": "x"}<|observation|>', [("f", {"a": "x"})], ""),
    (Glm4, "f\nis a letter", [], "f\nis a letter"),
    (
        KimiK2,
        'ok<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{"a": "x"}'
        "<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
        [("f", {"a": "x"})],
        "ok",
    ),
    (Llama3, '<|python_tag|>{"name": "f", "parameters": {"a": "x"}}<|eom_id|>', [("f", {"a": "x"})], ""),
    (Llama3, '{"type": "function", "name": "f", "parameters": {"a": "x"}}<|eot_id|>', [("f", {"a": "x"})], ""),
    (Llama3, '{"a": 1} is JSON', [], '{"a": 1} is JSON'),
    (Llama3, '{"name": "Alice", "age": 3}', [], '{"name": "Alice", "age": 3}'),
    (Llama3, '{"name": "g"}', [("g", {})], ""),
    (Llama3, '{"name": "f", "parameters": {"a": "<|python_tag|></think>"}}',
     [("f", {"a": "<|python_tag|></think>"})], ""),
    (Hermes, '<tool_call>\n{"name": "f", "arguments": {"a": "ends </tool_call> here"}}\n</tool_call>',
     [("f", {"a": "ends </tool_call> here"})], ""),
    (Hermes, '<tool_call>{"name": "g"}\n<tool_call>{"name": "f", "arguments": {}}</tool_call></think>',
     [("g", {}), ("f", {})], "</think>"),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a": "</tool_call><tool_call>\\"</think>"}}</tool_call>',
     [("f", {"a": '</tool_call><tool_call>"</think>'})], ""),
    (Hermes, 'May I use <tool_call> here?</think>\n<tool_call>{"name": "g"}</tool_call>', [("g", {})], ""),
    (Mistral, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "[TOOL_CALLS]"}, "id": "abcdefghi"}]</s>',
     [("f", {"a": "[TOOL_CALLS]"})], ""),
    (Mistral, 'ok[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": "x"}[TOOL_CALLS]g{}</s>',
     [("f", {"a": "x"}), ("g", {})], "ok"),
    (Mistral, '[THINK]hm[/THINK][TOOL_CALLS]g[ARGS]{}', [("g", {})], ""),
    (Glm4, 'f\n{"a": "<|assistant|>g\\n{}"}<|observation|>', [("f", {"a": "<|assistant|>g\n{}"})], ""),
    (Qwen3Coder, "<function=f>\n<parameter=a>\nx\n</parameter>\n</function>", [("f", {"a": "x"})], ""),
    (Qwen3Coder, "So:\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
     [("f", {"a": "x"})], "So:\n\n</tool_call>"),
    (Qwen3Coder, "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</tool_call>", [("f", {"a": "x"})], ""),
    (Qwen3Coder, "<tool_call>\n<function=f>\n<parameter=a>\nx\n<parameter=n>\n3\n</parameter>\n</function>",
     [("f", {"a": "x", "n": 3})], ""),
    (Qwen3Coder, "<tool_call><function=f><parameter=a>x</tool_call>\n<tool_call><function=g></function></tool_call>",
     [("f", {"a": "x"}), ("g", {})], ""),
    (Qwen3Coder, "write <function=h> in front", [], "write <function=h> in front"),
    (MiniMaxM2, '<invoke name="f"><parameter name="a">x</parameter></invoke>', [("f", {"a": "x"})], ""),
    (Pythonic, "[f(a='<|python_end|></think>')]", [("f", {"a": "<|python_end|></think>"})], ""),
    (Pythonic, "ok <|python_start|>[g()]<|python_end|><|eot|>", [("g", {})], "ok"),
    (Pythonic, "[f(a='x'), g.h(n=-1, b=[true])]<|eot|>", [("f", {"a": "x"}), ("g.h", {"n": -1, "b": [True]})], ""),
    (Pythonic, "[1] is a list", [], "[1] is a list"),
    (
        MiniMaxM2,
        'ok\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x</parameter>\n</invoke>\n'
        '<invoke name="g">\n</invoke>\n</minimax:tool_call>[e~[\n',
        [("f", {"a": "x"}), ("g", {})],
        "ok",
    ),
    (Plain, "So <tool>1+1</tool><|end|>", [("f", {"a": "1+1"})], "So"),
    (Plain, "the tag <tool>1+1</tool> is content here", [], "the tag <tool>1+1</tool> is content here"),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "text", "calls", "content"), TURNS)
def test_turns(parser: type[ToolParserBase], text: str, calls: list[tuple[str, Any]], content: str) -> None:
    f = schemas([ToolCall("", "f", {"a": "", "n": 0})])
    tools = schemas([ToolCall("", "f", {"a": ""})]) if parser is Plain else [*f, *schemas([ToolCall("", "g", {})])]
    turn = parser().parse(text, tools)
    assert [(call.name, call.arguments) for call in turn.calls] == calls
    assert (turn.content, turn.ill_formed) == (content, [])


def test_a_tag_without_a_call_does_not_hide_the_next_call() -> None:
    turn = Hermes().parse('First <tool_call> opens a call.\n<tool_call>{"name": "g"}</tool_call>')
    assert [call.name for call in turn.calls] == ["g"]
    assert [call.text for call in turn.ill_formed] == [" opens a call.\n"]


def test_kimi_ids_are_kept() -> None:
    text = KimiK2().render([ToolCall("functions.f:7", "f", {})])
    assert KimiK2().parse(text).calls[0].id == "functions.f:7"


SUITES = [
    TestHermes, TestQwen3Coder, TestMiniMaxM2, TestGlm45, TestGlm4, TestDeepSeekV3, TestDeepSeekV31, TestKimiK2,
    TestLlama3, TestMistral, TestMistralNamed, TestPythonic, TestPlain,
]  # fmt: skip


@pytest.mark.parametrize("suite", SUITES)
def test_a_template_is_claimed_by_its_own_form_alone(suite: type[ToolParserContract]) -> None:
    claiming = [other.component for other in SUITES if other().parser.claims(suite.chat_template)]
    assert claiming == [suite.component]


def test_the_plain_form_is_for_one_tool_with_one_argument() -> None:
    two = schemas([ToolCall("", "f", {"a": "", "b": ""})])
    assert "has 2" in Plain().parse("<tool>x</tool>", two).ill_formed[0].problem
    assert "there are 0" in Plain().parse("<tool>x</tool>").ill_formed[0].problem
