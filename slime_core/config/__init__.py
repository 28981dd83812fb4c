"""The user's settings: `Args` (every flag as an attribute) and `load_settings` (the sources of the values).

Loaded lazily, because pydantic is not needed to print a command's name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slime_core.lazy import exports

if TYPE_CHECKING:
    from slime_core.config.flag_parser import FlagParser as FlagParser
    from slime_core.config.foreign import ForeignFlags as ForeignFlags
    from slime_core.config.load import load_settings as load_settings
    from slime_core.config.schema import Args as Args
    from slime_core.config.sections.evaluation import EvalDataset as EvalDataset
    from slime_core.config.settings import Origin as Origin
    from slime_core.config.settings import Settings as Settings

_EXPORTS = exports(__file__)
__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'slime_core.config' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
