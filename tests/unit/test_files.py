"""`replace_file`: readers see the old file or the new one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_core.files import replace_file


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "x.json"
    replace_file(path, b"old", durable=durable)
    replace_file(path, (part for part in (b"n", b"ew")), durable=durable)
    assert path.read_bytes() == b"new"
    assert [*tmp_path.iterdir()] == [path]


def test_a_failure_in_the_middle_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"old")

    def parts() -> Iterator[bytes]:
        yield b"new"
        assert path.read_bytes() == b"old"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(path, parts())
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


def test_a_directory_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "gone" / "x.json", b"")
    assert not (tmp_path / "gone").exists()
