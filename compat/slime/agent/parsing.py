"""Parse a turn of the model into reasoning, text and tool calls (`slime.agent.parsing.parse_model_output`).

THUDM/slime uses SGLang's parsers; here the plugins of kind `tool_parsers` parse, some also under SGLang's names. Text
in <think> tags is reasoning, with or without a named reasoning parser.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_data.tool_parsers import tool_parser

from slime import _missing
from slime_core.config.schema import Args
from slime_core.data.tools import AUTO
from slime_core.tools import ToolParser

_SGLANG = {
    "qwen25": "qwen", "glm": "glm45", "glm47": "glm45", "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31",
    "minimax-m2": "minimax_m2", "llama3": "llama3",
}  # fmt: skip
"""SGLang's name of a tool call parser -> slime's name, if they differ."""
_THINK = (
    "deepseek-r1", "deepseek-v3", "deepseek-v31", "glm45", "glm47", "kimi_k2", "mimo", "minimax", "nano_v3", "qwen3",
    "qwen3-thinking", "step3",
)  # fmt: skip
"""SGLang's reasoning parsers whose tags are <think> and </think>."""


@dataclass(frozen=True)
class ParsedModelOutput:
    """The parts of a turn."""

    reasoning: str
    text: str
    tool_uses: list[dict[str, Any]] = field(default_factory=list)
    """Tool calls, `{"name": ..., "input": {...}}` each."""
    ill_formed: bool = False
    """True if a call could not be parsed."""


_XML_CALL = re.compile(r"<tool_call>\s*<function=([^>]+)>(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>(.*?)</parameter>", re.DOTALL)


def parse_model_output(
    raw_output: str,
    *,
    tools_schema: list[dict[str, Any]] | None = None,
    tool_parser_name: str | None = None,
    reasoning_parser_name: str | None = None,
) -> ParsedModelOutput:
    """Split a turn into reasoning, text and tool calls.

    Args:
        raw_output: Text of the turn, decoded with its special tokens.
        tools_schema: Schemas of the available tools; without tools the result has no calls.
        tool_parser_name: Name of the tool parser; None: calls in XML (`<function=name>`) or Hermes' JSON.
        reasoning_parser_name: Reasoning parser of a family with <think> tags.

    Raises:
        ValueError: The reasoning parser is of another family.
        slime_core.errors.SlimeError: The tool parser does not exist.
    """
    check_reasoning_parser(reasoning_parser_name)
    if not tools_schema:
        parsed = parser_of("plain").parse(raw_output)
    elif tool_parser_name is None and "<function=" in raw_output:
        parsed = parser_of("qwen3_coder").parse(raw_output, _schemas(tools_schema))
    else:
        parsed = parser_of(tool_parser_name).parse(raw_output, _schemas(tools_schema))
    uses = [{"name": call.name, "input": _mapping(call.arguments)} for call in parsed.calls]
    return ParsedModelOutput(parsed.reasoning, parsed.content, uses, bool(parsed.ill_formed))


def parse_xml_tool_uses(body_text: str, tools_schema: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Return (text, calls) for calls in XML: `<tool_call><function=name><parameter=key>value</parameter>...`.

    Values are strings. A call of a tool that is not in the schema stays in the text.
    """
    known = {(tool.get("function") or {}).get("name") for tool in tools_schema}
    calls: list[dict[str, Any]] = []

    def taken(found: re.Match[str]) -> str:
        name, body = found.groups()
        if name not in known:
            return found[0]
        calls.append({"name": name, "input": {key: value.strip() for key, value in _PARAMETER.findall(body)}})
        return ""

    return _XML_CALL.sub(taken, body_text), calls


def parser_of(name: str | None, tokenizer: Any = None) -> ToolParser:
    """Return the tool parser with slime's or SGLang's name; None: the chat template's parser, else `hermes`.

    Raises:
        slime_core.errors.SlimeError: No tool parser has this name.
    """
    return tool_parser(
        Args.model_construct(tool_call_parser=_SGLANG.get(name or "", name or AUTO)), tokenizer, "hermes"
    )


def check_reasoning_parser(name: str | None) -> None:
    """Raise ValueError for a family that does not use <think> and </think>."""
    if name is not None and name not in _THINK:
        raise ValueError(f"reasoning_parser {name!r}: only <think> tags are read; one of {', '.join(_THINK)}, or None")


def _schemas(tools: Sequence[Mapping[str, Any]]) -> Any:
    return list(tools)


def _mapping(arguments: Any) -> dict[str, Any]:
    return dict(arguments) if isinstance(arguments, Mapping) else {"_raw_arguments": arguments}


__all__ = ["ParsedModelOutput", "parse_model_output", "parse_xml_tool_uses"]
__getattr__ = _missing.names(__name__)
