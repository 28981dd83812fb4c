"""What is put on the path of the servers, imported as they import it: in another interpreter, without slime."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from slime_engine_sglang.environment import CPU_STUBS, SERVER_SIDE

STUBS = sorted(path.name for path in CPU_STUBS.iterdir() if path.name != "__pycache__")


def python(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run([sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True)


def test_each_stub_has_a_place_on_the_path() -> None:
    assert STUBS == ["sgl_kernel", "slime_stub", "torchaudio", "torchvision"]
    for name in STUBS:
        assert [path.name for path in (CPU_STUBS / name).iterdir() if path.name != "__pycache__"] == [name]


@pytest.mark.parametrize(
    ("package", "code", "called"),
    [
        ("sgl_kernel", "from sgl_kernel import silu_and_mul as f", "sgl_kernel.silu_and_mul"),
        ("torchvision", "from torchvision.io import decode_jpeg as f", "torchvision.io.decode_jpeg"),
        ("torchvision", "import torchvision.transforms.v2.functional as t; f = t.crop",
         "torchvision.transforms.v2.functional.crop"),
        ("torchaudio", "import torchaudio.functional as t; f = t.resample", "torchaudio.functional.resample"),
    ],
)  # fmt: skip
def test_a_stub_is_imported_and_says_what_was_called(package: str, code: str, called: str) -> None:
    done = python(f"{code}\nf(1)", CPU_STUBS / package, CPU_STUBS / "slime_stub")
    assert f"NotImplementedError: {called} was called, but only slime's stub" in done.stderr


def test_sglang_finds_the_plugin_by_its_entry_point() -> None:
    (info,) = (SERVER_SIDE / "plugin").glob("*.dist-info")
    (entry,) = PathDistribution(info).entry_points
    assert (entry.group, entry.name) == ("sglang.srt.plugins", "slime")
    done = python(
        "from importlib.metadata import entry_points\n"
        "(entry,) = entry_points(group='sglang.srt.plugins')\nprint(entry.load().__module__)",
        SERVER_SIDE / "plugin",
    )
    assert done.stdout.strip() == entry.module
