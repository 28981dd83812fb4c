"""THUDM/slime's import name over slime_core: functions written for `slime` run unmodified.

User code imports it; slime_core never does. Importing it loads no torch. A module or a name that is not here is an
ImportError that says what to use instead, not a bare "no module named" (`_missing.py`), and a checkout of THUDM/slime
found beside this package is warned about, since only one of the two can be `slime` (`_others.py`).
"""

from __future__ import annotations

from slime import _missing, _others

__version__ = "0.1.0"

_missing.install()
_others.warn()
