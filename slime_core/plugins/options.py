"""`--set plugins.NAME.OPTION=VALUE` and the `plugins` mapping of a file: is NAME a plugin at all?

Called when a command starts, once everything is discovered; names come from metadata and nothing is imported.
"""

from __future__ import annotations

import difflib
from typing import Any

from slime_core.errors import ConfigError
from slime_core.plugins.registry import Registry


def check_plugin_options(args: Any, registry: Registry, origin: str = "") -> None:
    """Refuse options that nobody reads, because no plugin of any kind, hook modules included, has the name.

    Args:
        args: The run's settings; `args.plugins` is {plugin name: {option: value}}.
        registry: The components discovered.
        origin: Where `plugins` was set, for the message.

    Raises:
        ConfigError: A name is not registered.
    """
    known = sorted({ref.name for ref in registry})
    for name in args.plugins:
        if name in known:
            continue
        close = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
        hint = f"Did you mean plugins.{close[0]}?" if close else "`slime plugins list` shows the names."
        place = f" ({origin})" if origin else ""
        raise ConfigError(
            f"plugins.{name}{place}: no plugin {name!r} is installed or in a --plugin-dir. {hint}"
            " Options of your own functions go under 'custom' or into --custom-config-path"
        )
