"""`--tools-path` -> the tools that a run's model may call.

Generate functions call `slime_core.run_tools`, and `slime_core.tool_parser` of a plugin (`slime_data.tool_parsers`);
the data source gives the schemas to the chat template. A row with its own `tools` (`--tool-key`) shows only these in
its prompt, and its sample may call only those of them that have a function of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from slime_core.plugins.manager import current_registry
from slime_core.plugins.registry import Registry
from slime_core.plugins.resolve import resolve
from slime_core.protocols import Args

if TYPE_CHECKING:
    from slime_core.tools import Tool

AUTO = "auto"


def run_tools(args: Args | None) -> tuple[Tool, ...]:
    """Return the tools of `--tools-path`, in order.

    Raises:
        ConfigError: Two tools have the same name, or no schema can be made for a tool.
        PluginError: A spec names nothing that can be loaded.
    """
    specs = tuple(args.tools_path) if args else ()
    return _loaded(specs, current_registry()) if specs else ()


@lru_cache(maxsize=16)
def _loaded(specs: tuple[str, ...], registry: Registry) -> tuple[Tool, ...]:
    from slime_core.tools import Tool, check_tools

    tools: list[Tool] = []
    for spec in specs:
        origin = f"--tools-path {spec!r}"
        found = resolve("tools", spec, origin="--tools-path", registry=registry).obj
        tools += [Tool.of(each, origin) for each in (found if isinstance(found, (list, tuple)) else [found])]
    check_tools([tool.schema for tool in tools], "--tools-path")
    return tuple(tools)


def prompt_tools(args: Args | None, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas for a sample's prompt: those of its row, else the run's."""
    own = metadata.get("tools")
    return list(own) if own else [tool.schema for tool in run_tools(args)]
