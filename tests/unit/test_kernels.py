"""C sources become functions once, and torch takes over where they cannot."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_core import kernels


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels._load.cache_clear()
    yield tmp_path / "slime" / "kernels"
    kernels._load.cache_clear()


def test_it_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = kernels.load("training")
    assert library is not None
    assert library.swiglu.argtypes is not None
    (made,) = cache.iterdir()
    kernels._load.cache_clear()
    monkeypatch.setattr(kernels.subprocess, "run", None)
    assert kernels.load("training") is not None, made


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
