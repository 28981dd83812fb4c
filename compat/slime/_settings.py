"""Settings that user code brings along -> slime_core's."""

from __future__ import annotations

from typing import Any


def settings_of(args: Any) -> Any:
    """`args`; where it is an object of THUDM/slime's shape, slime_core's settings with its values and our defaults."""
    from slime_core.config import Args

    return args if hasattr(args, "plugins") else Args.model_construct(**vars(args))
