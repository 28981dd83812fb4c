"""Where the list of flags comes from: the cache, the environment, or what slime ships."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from slime_engine_sglang import introspect
from slime_engine_sglang.engine import SglangEngine
from slime_engine_sglang.flag_list import SERVER, cache_file, installed_flags, size

from slime_core.config import load_settings
from slime_core.errors import ConfigError

SERVER_ARGS = """
import argparse
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        print("a warning on standard output")
        parser.add_argument("--depth", type=int, default=2, choices=[1, 2], help="How deep.")
"""


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIME_ENGINE_PYTHON", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of an environment with an SGLang 9.1 of few flags, which counts how often it is imported."""
    root = tmp_path / "venv"
    site = root / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for name, code in {
        "sglang/__init__.py": f"open({str(tmp_path / 'imports')!r}, 'a').write('x')",
        "sglang/srt/__init__.py": "",
        "sglang/srt/server_args.py": SERVER_ARGS,
        "torch/__init__.py": "class cuda:\n    is_available = staticmethod(lambda: True)\n",
        "sglang-9.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 9.1\n",
    }.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(code)
    (root / "bin").mkdir()
    real = Path(os.path.realpath(sys.executable))
    (root / "pyvenv.cfg").write_text(f"home = {real.parent}\n")
    (root / "bin" / "python").symlink_to(real)
    return root / "bin" / "python"


def imports(tmp_path: Path) -> int:
    return len((tmp_path / "imports").read_text())


def test_the_environment_is_asked_once_and_its_answer_kept(python: Path, tmp_path: Path) -> None:
    first = installed_flags(python)
    assert first.server.prog == "SGLang 9.1"
    assert cache_file({"sglang": "9.1"}) == tmp_path / "cache" / "slime" / "sglang-flags-9.1-none-1.json"
    assert json.loads(cache_file({"sglang": "9.1"}).read_text())["versions"] == {"sglang": "9.1"}
    installed_flags.cache_clear()
    again = installed_flags(python)
    assert again is not first
    assert again.server.option_strings == first.server.option_strings
    assert imports(tmp_path) == 1
    assert list((tmp_path / "cache" / "slime").glob("*.json*")) == [cache_file({"sglang": "9.1"})], "nothing partial"


@pytest.mark.parametrize("content", ["{", '{"schema": 1, "versions": {"sglang": "9.0"}, "server": [], "router": []}'])
def test_a_cache_file_that_cannot_be_used_is_made_anew(content: str, python: Path, tmp_path: Path) -> None:
    file = cache_file({"sglang": "9.1"})
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert installed_flags(python).field(SERVER, "depth") is not None
    assert json.loads(file.read_text())["schema"] == introspect.SCHEMA
    assert imports(tmp_path) == 1


def test_an_sglang_that_cannot_be_imported(python: Path) -> None:
    (next(python.parent.parent.glob("lib/*/site-packages")) / "sglang" / "__init__.py").write_text("import not_there")
    with pytest.raises(ConfigError, match=rf"SGLang 9.1 of {python} .*No module named 'not_there'; .*Type: {python} "):
        installed_flags(python)
    assert not cache_file({"sglang": "9.1"}).exists()


def test_sizes_are_read_as_sglang_reads_them() -> None:
    assert [size(text) for text in ("25.6k", "16Ki", "512", "-1")] == [25600, 16384, 512, -1]
    for text in ("1.5Ki", "1K", "x"):
        with pytest.raises(ArgumentTypeError, match=f"^'{text}' is no whole number, such as 32768 or 32k$"):
            size(text)


def test_a_version_that_returns_no_sampling_mask_is_refused_before_the_start(python: Path) -> None:
    argv = ["--hf-checkpoint", "m", "--rollout-engine", "sglang", "--device", "cpu", "--engine-python", str(python)]
    argv += ["--rollout-top-k", "9", "--use-sampling-mask"]
    with pytest.raises(ConfigError, match=r"^--use-sampling-mask .*SGLang 9.1 does not return .*; 0.5.23 does$"):
        SglangEngine.check_settings(load_settings(argv, command="serve", env={}))
