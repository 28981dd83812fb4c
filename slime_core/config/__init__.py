"""The user's settings: `Args` (every flag as an attribute) and `load_settings` (the sources of the values).

Loaded lazily, because pydantic is not needed to print a command's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_core.lazy import Exports

if TYPE_CHECKING:
    from slime_core.config.flag_parser import FlagParser as FlagParser
    from slime_core.config.foreign import ForeignFlags as ForeignFlags
    from slime_core.config.load import load_settings as load_settings
    from slime_core.config.schema import Args as Args
    from slime_core.config.sections.evaluation import EvalDataset as EvalDataset
    from slime_core.config.settings import Origin as Origin
    from slime_core.config.settings import Settings as Settings

_EXPORTS = Exports(__name__, __file__)
__all__ = [*_EXPORTS.places]


def __getattr__(name: str) -> Any:
    return _EXPORTS.load(name)
