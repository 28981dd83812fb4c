"""What the user may set: `Args` (every flag as an attribute) and `load_settings` (where the values come from).

Loaded lazily, because pydantic is not needed to print a command's name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.config.flag_parser import FlagParser
    from slime_core.config.foreign import ForeignFlags
    from slime_core.config.load import load_settings
    from slime_core.config.origins import Origin
    from slime_core.config.schema import Args
    from slime_core.config.sections.evaluation import EvalDataset
    from slime_core.config.settings import Settings

_EXPORTS = {
    "Args": "slime_core.config.schema",
    "EvalDataset": "slime_core.config.sections.evaluation",
    "FlagParser": "slime_core.config.flag_parser",
    "ForeignFlags": "slime_core.config.foreign",
    "Origin": "slime_core.config.origins",
    "Settings": "slime_core.config.settings",
    "load_settings": "slime_core.config.load",
}

__all__ = ["Args", "EvalDataset", "FlagParser", "ForeignFlags", "Origin", "Settings", "load_settings"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'slime_core.config' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
