"""The names of `slime_core.sample.types`, importable from where code written for THUDM/slime finds them."""

from slime_core.sample import *  # noqa: F403
from slime_core.sample import __all__ as __all__
