"""`waits.bounded`: an exception that another thread raises, in time or too late."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from slime_core.waits import raise_in, take_late

PROFILED = """
import sys, threading
from slime_core.waits import raise_in, take_late

{late}
sys.setprofile(lambda *seen: None)
(lambda: None)()
sys.setprofile(None)
"""
MATH = "from slime_reward_math import within\nassert within(0.05, lambda: [0 for _ in iter(int, 1)]) is None"
LATE = "take_late(TimeoutError)"


def test_it_is_raised_where_it_is_meant_to_be() -> None:
    def interrupted() -> None:
        raise_in(threading.get_ident(), TimeoutError)
        for _ in range(10):
            pass

    with pytest.raises(TimeoutError):
        interrupted()
    take_late(TimeoutError)


@pytest.mark.parametrize("late", [LATE, pytest.param(MATH, marks=pytest.mark.slow)])
def test_a_profiler_can_be_used_afterwards(late: str) -> None:
    """CPython 3.11 hangs where a cancelled exception has left its request for a check."""
    subprocess.run([sys.executable, "-c", PROFILED.format(late=late)], check=True, timeout=60)
