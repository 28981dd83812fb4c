"""`--rollout-engine sglang` where there is no SGLang: said before anything starts, with what to type."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from slime_engine_http.api.versions import TESTED_VERSIONS

from tests.conftest import Slime, TinyRun

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is not None, reason="SGLang is installed beside slime"
)


@pytest.mark.parametrize("command", ["train", "check", "rollout"])
def test_no_environment(command: str, tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    argv = tiny.argv(tmp_path / "run", rollout_engine="sglang", device="cpu", no_preflight=None)
    done = slime(command, *argv, check=False, SLIME_ENGINE_PYTHON="")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("slime: error: --rollout-engine 'sglang' (flag): SGLang is not installed beside slime (")
    assert f"bin/pip install sglang=={TESTED_VERSIONS[-1]} sglang-router. Then type --engine-python" in line
    assert not (tmp_path / "run").exists()
