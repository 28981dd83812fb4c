"""`--tools-path` -> tools, `--tool-call-parser` -> parser: what a run's model may call, and how it writes calls.

Generate functions get both from here (`slime_core.run_tools`, `slime_core.tool_parser`), and the data source the
schemas that it gives to the chat template. A row's own `tools` (`--tool-key`) are what its prompt tells, and what its
sample may call; those without a function of that name cannot be called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from slime_core.errors import ConfigError
from slime_core.plugins.manager import current_registry
from slime_core.plugins.registry import Registry
from slime_core.plugins.resolve import resolve
from slime_core.plugins.signatures import construct
from slime_core.protocols import Args

if TYPE_CHECKING:
    from slime_core.tools import Tool, ToolParser

AUTO = "auto"
_FLAG = "--tool-call-parser"


def run_tools(args: Args | None) -> tuple[Tool, ...]:
    """The tools of `--tools-path`, in order.

    Raises:
        ConfigError: Two have one name, or one has no schema and none can be made.
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
    """The schemas that a sample's prompt tells: those of its row, else the run's."""
    own = metadata.get("tools")
    return list(own) if own else [tool.schema for tool in run_tools(args)]


def tool_parser(args: Args, tokenizer: Any, default: str | None = None) -> ToolParser:
    """The parser of `--tool-call-parser`; for `auto`, the one that claims the tokenizer's chat template.

    Args:
        args: The run's settings.
        tokenizer: HF tokenizer.
        default: Name of the parser that `auto` falls back to; None refuses.

    Raises:
        ConfigError: No installed parser claims the chat template, or several do.
        PluginError: There is no such parser.
    """
    if args.tool_call_parser != AUTO:
        return _parser(args.tool_call_parser, current_registry())
    template = None if tokenizer is None else tokenizer.chat_template
    return _claiming(_template_text(template), default, current_registry())


@lru_cache(maxsize=64)
def _parser(name: str, registry: Registry) -> ToolParser:
    found = resolve("tool_parsers", name, origin=_FLAG, registry=registry).obj
    parser: ToolParser = construct(found, None) if isinstance(found, type) else found
    return parser


@lru_cache(maxsize=16)
def _claiming(template: str, default: str | None, registry: Registry) -> ToolParser:
    claimants: dict[type, str] = {}
    for name in registry.names("tool_parsers"):
        parser = _parser(name, registry)
        if template and parser.claims(template):
            claimants.setdefault(type(parser), name)
    if len(claimants) == 1:
        return _parser(next(iter(claimants.values())), registry)
    if not claimants and default is not None:
        return _parser(default, registry)
    which = f"{' and '.join(claimants.values())} claim" if claimants else "no installed parser claims"
    known = ", ".join(registry.names("tool_parsers")) or "none installed"
    raise ConfigError(f"{_FLAG} auto: {which} the tokenizer's chat template; name one of: {known}")


def _template_text(template: Any) -> str:
    """A chat template, or all of those that a tokenizer with several has."""
    if isinstance(template, Mapping):
        return "\n".join(str(part) for part in template.values())
    if isinstance(template, Sequence) and not isinstance(template, str):
        return "\n".join(str(part.get("template", "")) for part in template if isinstance(part, Mapping))
    return template or ""
