"""What one sample's turns are made with: options, tools, parser.

`sample.metadata` wins over `args` (`--custom-config-path`), and that over `plugins.tool_use` for the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from slime_core import Args, PluginOptions, Sample, options, prompt_tools, run_tools, tool_parser
from slime_core.errors import ConfigError
from slime_core.tools import Tool, ToolParser, ToolSchema
from slime_generator_tool_use.calculator import calculator

_CALCULATOR = Tool.of(calculator)


class Options(PluginOptions):
    """Options of the generator `tool_use`."""

    max_turns: Annotated[int, Field(gt=0)] = 4
    """Model turns per sample."""
    max_calls_per_turn: Annotated[int, Field(gt=0)] = 16
    """Calls of one turn that are made; further ones are answered with an error."""
    tool_timeout: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that one call may take; then it is answered with an error."""
    tool_result_tokens: Annotated[int, Field(gt=0)] = 1024
    """Longer results are cut, in tokens."""
    tool_observation: str | None = None
    """Text of an observation with {result} in it; the chat template's tool message when not given."""


@dataclass(frozen=True)
class Settings:
    """The options of one sample, with what they are used on."""

    max_turns: int
    max_calls_per_turn: int
    tool_timeout: float
    tool_result_tokens: int
    tool_observation: str | None
    tools: dict[str, Tool]
    """By name: what may be called."""
    schemas: list[ToolSchema]
    """Of `tools`."""
    told: list[dict[str, Any]]
    """Schemas that the chat template was given."""
    parser: ToolParser

    @classmethod
    def of(cls, args: Args, sample: Sample, tokenizer: Any) -> Settings:
        """Raises ConfigError for options, tools or a parser that cannot be used."""
        declared = options(args, "tool_use", Options).model_dump()
        given = {name: sample.metadata.get(name, getattr(args, name, None)) for name in declared}
        chosen = Options.model_validate({**declared, **{k: v for k, v in given.items() if v is not None}})
        if chosen.tool_observation is not None and "{result}" not in chosen.tool_observation:
            raise ConfigError(f"tool_observation {chosen.tool_observation!r} has no {{result}} in it")
        told = prompt_tools(args, sample.metadata)
        tools = {tool.name: tool for tool in run_tools(args) or (_CALCULATOR,)}
        if sample.metadata.get("tools"):
            named = {str(schema.get("function", {}).get("name")) for schema in told}
            tools = {name: tool for name, tool in tools.items() if name in named}
        schemas: list[ToolSchema] = [tool.schema for tool in tools.values()]
        parser = tool_parser(args, tokenizer, default="plain")
        return cls(**chosen.model_dump(), tools=tools, schemas=schemas, told=told, parser=parser)
