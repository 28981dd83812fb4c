"""`--rollout-engine sglang` where there is no SGLang: said before anything starts, with what to type."""

from __future__ import annotations

import importlib.util
import subprocess
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


def test_an_environment_without_sglang(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    python = tmp_path / "empty" / "bin" / "python"
    subprocess.run(["python3", "-m", "venv", "--without-pip", tmp_path / "empty"], check=True, timeout=60)
    argv = tiny.argv(tmp_path / "run", rollout_engine="sglang", device="cpu", engine_python=python)
    done = slime("train", *argv, check=False)
    assert done.returncode == 2
    assert f"{str(python)!r}: SGLang is not installed there. Type: {python} -m pip install sglang" in done.stderr
    assert not (tmp_path / "run").exists()


def test_an_interpreter_that_is_not_there(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    argv = tiny.argv(tmp_path / "run", rollout_engine="sglang", device="cpu", engine_python=tmp_path / "none")
    done = slime("check", *argv, check=False)
    assert done.returncode == 2
    assert "no Python interpreter; expected that of the environment SGLang is installed in" in done.stderr
    assert not (tmp_path / "run").exists()
