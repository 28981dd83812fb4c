from __future__ import annotations

import json
import os
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_data.parquet import ParquetRows

from slime_core.data import dataset
from slime_core.data.dataset import open_rows
from slime_core.errors import DataError


def write_jsonl(path: Path, rows: list[dict], blank_after: int | None = None) -> Path:
    lines = [json.dumps(row) for row in rows]
    if blank_after is not None:
        lines.insert(blank_after, "  \t")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


ROWS = [{"input": f"question {i}", "n": i} for i in range(10)]


@pytest.mark.parametrize(
    "bounds",
    ["", "@[:]", "@[2:5]", "@[:3]", "@[7:]", "@[-3:]", "@[:-8]", "@[-5:-2]", "@[3:100]", "@[-100:2]"],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_slices_are_pythons(tmp_path: Path, bounds: str, suffix: str) -> None:
    path = tmp_path / f"data{suffix}"
    if suffix == ".jsonl":
        write_jsonl(path, ROWS, blank_after=4)
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=3)
    expected = eval(f"ROWS{bounds[1:]}") if bounds else ROWS
    rows = open_rows(f"{path}{bounds}")
    assert [rows[i] for i in range(len(rows))] == expected


def test_a_malformed_line_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"input": "a"}\n\n{"input": oops}\n{"input": "b"}\n[1]\n{"input": "c"}\n', encoding="utf-8")
    rows = open_rows(path)
    assert len(rows) == 5
    with pytest.raises(DataError, match=r"data\.jsonl:3: not JSON: .* at column 11"):
        rows[1]
    with pytest.raises(DataError, match=r"data\.jsonl:5: a JSON list; each line must be an object"):
        rows[3]
    assert rows[4] == {"input": "c"}


@pytest.mark.parametrize("rest", ["NaN", '"\\ud800"', "[" * 3000 + "]" * 3000])
def test_a_row_with_a_long_integer_is_refused_as_others_are(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "data.jsonl"
    good, bad = f'{{"label": {10**30}}}', f'{{"label": {10**30}, "input": {rest}}}'
    path.write_text("\n".join((good, bad, good)), encoding="utf-8")
    rows = open_rows(path)
    assert rows[0] == {"label": 10**30}
    with pytest.raises(DataError, match=r"data\.jsonl:2: not JSON"):
        rows[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jsonl", "no such file"),
        ("data.csv", r"cannot read \.csv; use \.jsonl or \.parquet"),
        (".", "a directory"),
        ("broken.jsonl", r"a link to gone\.jsonl, which is not there"),
        ("loop.jsonl", r"a link to loop\.jsonl, which is not there"),
        ("pipe.jsonl", "a pipe or a device; write the rows to a file"),
        ("zero.jsonl", "a pipe or a device; write the rows to a file"),
        ("unreadable.jsonl", "cannot be read: "),
        ("closed/data.jsonl", "cannot be read: Permission denied"),
    ],
)
def test_paths_that_are_not_data(tmp_path: Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.csv").write_text("a,b\n")
    links = {"broken": "gone.jsonl", "loop": "loop.jsonl", "zero": "/dev/zero", "unreadable": "/proc/self/mem"}
    for link, target in links.items():
        (tmp_path / f"{link}.jsonl").symlink_to(target)
    os.mkfifo(tmp_path / "pipe.jsonl")
    if name.startswith("closed"):  # as it is for others than root

        def refused(path: Path) -> bool:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "is_dir", refused)
    with pytest.raises(DataError, match=f"--prompt-data .*{message}"):
        open_rows(tmp_path / name)


def test_parquet_cache_is_bounded_and_right_under_random_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    path = tmp_path / "data.parquet"
    rows = [{"input": "x" * 1000, "n": i} for i in range(100)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=10)
    monkeypatch.setattr("slime_data.parquet._CACHE_BYTES", 25_000)
    source = ParquetRows(path)
    for i in (99, 0, 55, 54, 12, 99, 31, 0):
        assert source[i]["n"] == i
        assert 1 <= len(source._cache) <= 2
    assert source.where(55).endswith("data.parquet, row 56")


@given(
    lines=st.lists(st.sampled_from(["", " ", "\t\r", '{"a": 1}', '  {"a": 2} ', '{"a": "\u00e9"}\r']), max_size=30),
    final_newline=st.booleans(),
    read_bytes=st.integers(1, 40),
)
def test_the_index_finds_what_a_plain_reader_finds(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], final_newline: bool, read_bytes: int
) -> None:
    text = "\n".join(lines) + ("\n" if final_newline else "")
    path = tmp_path_factory.mktemp("index") / "data.jsonl"
    path.write_bytes(text.encode())
    expected = [(number, json.loads(line)) for number, line in enumerate(text.encode().split(b"\n"), 1) if line.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "_READ_BYTES", read_bytes)
        rows = dataset.JsonlRows(path)
        assert [rows[i] for i in range(len(rows))] == [row for _, row in expected]
        assert [rows.where(i) for i in range(len(rows))] == [f"{path}:{number}" for number, _ in expected]
    rows.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_file_that_changes_while_it_is_read(tmp_path: Path, stream: bool) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", ROWS)
    rows = open_rows(path, stream=stream)
    first, opened = rows[0], rows.fingerprint()
    with path.open("a") as file:
        file.write('{"half')  # appended to: the rows that were there are read on
    assert rows[0] == first
    path.unlink()
    assert (rows[0], rows.fingerprint(), rows.where(0)) == (first, opened, f"{path}:1")
    rows.close()
    path = write_jsonl(tmp_path / "data.jsonl", ROWS)
    rows = open_rows(path, stream=stream)
    path.write_text("[]" * 1000)
    with pytest.raises(
        DataError, match=r"data\.jsonl:1: not JSON: .* \(the file has been changed since the run opened"
    ):
        rows[0]
    rows.close()


def test_a_large_file_stays_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "_READ_BYTES", 1 << 20)
    path = tmp_path / "large.jsonl"
    path.write_text(json.dumps({"input": "x" * 1000}) + "\n")
    path.write_bytes(path.read_bytes() * 20_000)
    tracemalloc.start()
    try:
        rows = open_rows(path)
        assert [len(rows[i]["input"]) for i in range(0, 20_000, 997)] == [1000] * 21
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 4
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("missing", "message"),
    [(False, r"data\.parquet: not a parquet file"), (True, r"slime-rl\[parquet\]")],
)
def test_parquet_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: bool, message: str
) -> None:
    (tmp_path / "data.parquet").write_bytes(b"not parquet at all")
    for name in ("pyarrow", "pyarrow.parquet") if missing else ():
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=message):
        open_rows(tmp_path / "data.parquet")
