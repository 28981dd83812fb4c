"""The hook plugin of a process that a Trainer started; `control.py` names it by an entry point of that process."""

from __future__ import annotations

import os

from slime_python.channel import VARIABLE
from slime_python.loops import MODES

plugin = MODES[os.environ[VARIABLE].partition(":")[0]]()
"""Found in every process of the run; only the leading one calls its loop, which connects to the Trainer."""
