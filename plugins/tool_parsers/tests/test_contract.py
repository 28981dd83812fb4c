from __future__ import annotations

from typing import Any, ClassVar

from slime_testing_contracts import ToolParserContract

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
