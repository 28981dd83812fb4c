"""Which megatron-core is taken, and what of its noise is left out."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
from slime_trainer_megatron import installed
from slime_trainer_megatron.installed import check_installed, check_version

from slime_core.errors import ConfigError

LOOK = """
import sys
from slime_trainer_megatron.installed import check_installed
try:
    check_installed()
except Exception as error:
    print(type(error).__name__, error)
print("megatron.core" in sys.modules, "torch" in sys.modules)
"""


def look(**env: str) -> list[str]:
    argv = [sys.executable, "-c", LOOK]
    done = subprocess.run(argv, env=os.environ | env, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_looking_imports_neither_megatron_nor_torch() -> None:
    assert look() == ["False False"]


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed()
    check_version()
    refused = r"megatron-core 0\.17\.0 .*only 0\.16\.\*; .*pip install"
    monkeypatch.setattr(importlib.import_module("megatron.core.package_info"), "__version__", "0.17.0")
    with pytest.raises(ConfigError, match=refused):
        check_version()
    monkeypatch.setattr(installed.runpy, "run_path", lambda file: {"__version__": "0.17.0"})
    with pytest.raises(ConfigError, match=refused):
        check_installed()
