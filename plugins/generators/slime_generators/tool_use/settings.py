"""Settings for the turns of a sample: options, tools, parser.

For each name, `sample.metadata` takes precedence over `args` (`--custom-config-path`), and `args` over
`plugins.tool_use`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from slime_tool_parsers import Tool

from slime_core import Args, PluginOptions, Sample, options, prompt_tools, run_tools, tool_parser
from slime_core.errors import ConfigError
from slime_core.tools import ToolParser, ToolSchema
from slime_generators.tool_use.calculator import calculator

_CALCULATOR = Tool.of(calculator)


class Options(PluginOptions):
    """Options of the generator `tool_use`."""

    max_turns: Annotated[int, Field(gt=0)] = 4
    """Model turns per sample."""
    max_calls_per_turn: Annotated[int, Field(gt=0)] = 16
    """Maximum number of executed calls per turn; further calls get an error as result."""
    tool_timeout: Annotated[float, Field(gt=0)] = 30.0
    """Time limit of a call in seconds; a longer call gets an error as result."""
    tool_result_tokens: Annotated[int, Field(gt=0)] = 1024
    """Maximum tokens of a result; longer results are truncated."""
    tool_observation: str | None = None
    """Text of an observation, containing {result}. Default: the chat template's tool message."""


@dataclass(frozen=True)
class Settings:
    """The options, tools and parser of one sample."""

    max_turns: int
    max_calls_per_turn: int
    tool_timeout: float
    tool_result_tokens: int
    tool_observation: str | None
    tools: dict[str, Tool]
    """Tools that may be called, by name."""
    schemas: list[ToolSchema]
    """Schemas of `tools`."""
    told: list[dict[str, Any]]
    """Schemas that were passed to the chat template."""
    parser: ToolParser

    @classmethod
    def of(cls, args: Args, sample: Sample, tokenizer: Any) -> Settings:
        """Build the settings of a sample. Raises ConfigError for unusable options, tools or parser."""
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
