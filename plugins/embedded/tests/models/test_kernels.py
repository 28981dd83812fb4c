"""Functions in C, and storages that they read."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from slime_embedded import kernels
from slime_embedded.models.storages import Storages

ROOT = Path(__file__).parents[4]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels._load.cache_clear()
    yield tmp_path / "slime" / "kernels"
    kernels._load.cache_clear()


def test_it_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A source of one line: those of ours take seconds, and whatever trains has them compiled."""
    (tmp_path / "products.c").write_text("#include <stdint.h>\n")
    (tmp_path / "small.c").write_text(
        "void twice(float *x, int64_t n) { for (int64_t i = 0; i < n; i++) x[i] *= 2; }\n"
    )
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "__init__.py"))
    library = kernels.load("small")
    assert library is not None
    x = torch.tensor([1.0, 3.0])
    library.twice(x.data_ptr(), 2)
    assert x.tolist() == [2.0, 6.0]
    (made,) = cache.iterdir()
    kernels._load.cache_clear()
    monkeypatch.setattr(kernels.subprocess, "run", None)
    assert kernels.load("small") is not None, made


def test_without_a_compiler_it_says_so_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.WARNING):
        assert [kernels.load("training") for _ in range(2)] == [None, None]
    (said,) = caplog.messages
    assert "no C compiler" in said


def test_what_the_compiler_says_or_that_it_failed_is_told(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "false")
    assert kernels.load("training") is None
    assert "non-zero exit status" in caplog.text
    assert list(cache.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="it has none anyway")
def test_without_avx512_results_are_right_as_well(tmp_path: Path) -> None:
    """The sources have shorter vectors there: other tests of them, run with a compiler that knows no longer ones."""
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nexec gcc "$@" -mno-avx512f\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    tests = ROOT / "plugins" / "embedded" / "tests"
    files = [tests / "models/test_lean_autograd.py", tests / "engine/test_parts.py", tests / "engine/test_engine.py"]
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    assert len(list((tmp_path / "slime" / "kernels").iterdir())) == 2, "compiled by it"


RESIDENT = """
from pathlib import Path
import torch
from slime_embedded.models.storages import Storages

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

storages = Storages([torch.ones(64 << 20, dtype=torch.uint8)])
before = resident()
storages.free()
print(before - resident())
"""


@pytest.mark.slow
def test_the_system_has_the_memory_back() -> None:
    """In a process of its own: what else lives in this one, and its allocators, would count too."""
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) > 0.9 * (64 << 20)


def test_what_numpy_holds_is_kept_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    held, free = torch.ones(10), torch.ones(10)
    array = held.numpy()
    storages = Storages([held, free])
    with caplog.at_level(logging.WARNING, logger="slime_core"):
        for _ in range(2):
            storages.free()
            assert storages.nbytes == 40
            storages.allocate()
    assert [record.getMessage() for record in caplog.records] == [
        "40 bytes are not given back: something holds NumPy arrays of these tensors"
    ]
    assert array.sum() == 10
