"""`--tool-call-parser` -> parser: how a run's model writes calls of tools.

Generate functions call `slime_core.tool_parser` (entry-point group `slime.api`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from slime_core.data.tools import AUTO
from slime_core.errors import ConfigError
from slime_core.plugins.manager import current_registry
from slime_core.plugins.registry import Registry
from slime_core.plugins.resolve import resolve
from slime_core.plugins.signatures import construct
from slime_core.protocols import Args

if TYPE_CHECKING:
    from slime_core.tools import ToolParser

__all__ = ["tool_parser"]

_FLAG = "--tool-call-parser"


def tool_parser(args: Args, tokenizer: Any, default: str | None = None) -> ToolParser:
    """Return the parser of `--tool-call-parser`; for `auto`, the one that claims the tokenizer's chat template.

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
    """Return a chat template, or all templates of a tokenizer with several."""
    if isinstance(template, Mapping):
        return "\n".join(str(part) for part in template.values())
    if isinstance(template, Sequence) and not isinstance(template, str):
        return "\n".join(str(part.get("template", "")) for part in template if isinstance(part, Mapping))
    return template or ""
