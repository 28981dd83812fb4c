"""C sources become functions once, and torch takes over where they cannot."""

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
    files = [tests / "models/test_lean_autograd.py", tests / "engine/test_linear.py", tests / "engine/test_core.py"]
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *map(str, files),
    ]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    assert len(list((tmp_path / "slime" / "kernels").iterdir())) == 2, "compiled by it"
