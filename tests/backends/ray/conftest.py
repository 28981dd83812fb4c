"""What the tests on Ray share: commands in a directory of their own, and one run that others are compared with."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyRun
from tests.zygote import Zygote

ROLLOUTS = 5
"""Of `inline`, and of what is compared with it."""


@pytest.fixture
def typed(
    slime: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`slime(...)` in `tmp_path`, with time for actors to start."""
    monkeypatch.chdir(tmp_path)
    return lambda *argv, **named: slime(*argv, **{"timeout": 300, **named})


@pytest.fixture(scope="session")
def inline(tiny: TinyRun, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run without Ray; do not change it."""
    save = tmp_path_factory.mktemp("inline") / "run"
    done: Any = zygote.run(["train", *tiny.argv(save, num_rollout=ROLLOUTS)], dict(os.environ), 120)
    assert done.returncode == 0, done.stderr
    return save
