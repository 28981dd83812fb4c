from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from slime_engine_http import environment
from slime_engine_http.api.versions import TESTED_VERSIONS
from slime_engine_sglang.environment import (
    CPU_STUBS,
    SERVER_SIDE,
    engine_python,
    find_python,
    installed_versions,
    server_environment,
)

from slime_core.config import Args
from slime_core.errors import ConfigError

pytestmark = pytest.mark.skipif(
    "sglang" in environment._in(sys.path, ["sglang"]),
    reason="the messages are those of a core without SGLang beside it",
)


@pytest.fixture(autouse=True)
def _nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIME_ENGINE_PYTHON", raising=False)


def make_environment(folder: Path, *infos: str) -> Path:
    site = folder / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    for info in infos:
        (site / f"{info}.dist-info").mkdir()
        name, version = info.split("-")
        (site / f"{info}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    return folder / "bin" / "python"


def args(python: object = None) -> Args:
    return Args(engine_python=python)


def test_the_flag_goes_before_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_environment(tmp_path / "a", "sglang-9.1")
    second = make_environment(tmp_path / "b", "sglang-9.2")
    monkeypatch.setenv("SLIME_ENGINE_PYTHON", str(second))
    assert engine_python(args()) == second
    assert engine_python(args(str(first))) == first
    assert engine_python(args(str(tmp_path / "a"))) == first, "the environment's directory will do"


def test_an_interpreter_outside_a_virtual_environment_is_asked(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for name, version in (("sglang", "9.3"), ("sglang_router", "9.4")):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert installed_versions(python) == {"sglang": "9.3", "sglang-router": "9.4"}
    python = tmp_path / "broken"
    python.write_text("#!/bin/sh\necho no such library >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"does not run: no such library$"):
        installed_versions(python)


def test_without_sglang_the_message_says_what_to_type(tmp_path: Path) -> None:
    assert find_python(args()) is None
    with pytest.raises(ConfigError, match=f"sglang=={TESTED_VERSIONS[-1]} .*--engine-python .*SLIME_ENGINE_PYTHON"):
        engine_python(args())
    with pytest.raises(ConfigError, match=r"SLIME_ENGINE_PYTHON '/no/python': no Python interpreter;"):
        find_python(args("/no/python"))
    bare = make_environment(tmp_path / "bare")
    command = f"{bare} -m pip install sglang==0.5.23 sglang-router$"
    with pytest.raises(ConfigError, match=f"'{bare}': SGLang is not installed there. Type: {command}"):
        find_python(args(str(bare)))


def test_cpu_servers_get_stubs_and_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "OMP_NUM_THREADS", "SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    found = server_environment("cpu")
    stubs = [str(CPU_STUBS / name) for name in ("sgl_kernel", "slime_stub", "torchaudio", "torchvision")]
    assert found["PYTHONPATH"].split(os.pathsep) == [str(SERVER_SIDE / "plugin"), *stubs]
    assert {k: v for k, v in found.items() if k != "PYTHONPATH"} == {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
    }
    python = make_environment(tmp_path / "v")
    package = tmp_path / "v" / "lib" / "python3.11" / "site-packages" / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    assert server_environment("cpu", python=python)["PYTHONPATH"].split(os.pathsep)[1:] == stubs[:3]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "OMP_NUM_THREADS" not in server_environment("cpu"), "the user's own stays"
