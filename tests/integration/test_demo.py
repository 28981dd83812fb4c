"""The demo learns on every seed, and random rewards teach nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "demo_seeds.py"


@pytest.mark.backends
@pytest.mark.timeout(1800)
def test_five_seeds_learn_and_their_controls_do_not() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=1700)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
