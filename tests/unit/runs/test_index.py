"""The index of kept samples: orders, totals, filters and the time that a question may take."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import zstandard
from slime_data import saved
from slime_runs import Run, files
from slime_runs.files import damage, file_name, json_lines, read_frame, read_frames, write_file
from slime_runs.index import Facts, Filter, Index
from slime_runs.overview import overview

from slime_core.errors import DataError


def _row(index: int, score: float | None, *, fate: str = "trained", data_set: str | None = None) -> dict[str, Any]:
    return {
        "index": index, "group_index": index // 2, "row": index % 3,
        "tokens": [1] * (index + 2), "response_length": index + 1,
        "status": "completed" if score is not None else "failed",
        "kept": {"fate": fate, "data_set": data_set, "score": score},
    }  # fmt: skip


def _write(path: Path, rows: list[Any]) -> None:
    Facts([rows]).write(path, [json_lines(rows)])


@pytest.fixture
def index(tmp_path: Path) -> Index:
    rollouts = {
        0: [_row(0, 0.5), _row(1, None), _row(2, 1.0), _row(3, 0.0, fate="dropped")],
        1: [_row(4, 1.0), _row(5, 0.0)],
    }
    for rollout, rows in rollouts.items():
        _write(tmp_path / file_name(rollout), rows)
    return Index(tmp_path)


@pytest.mark.parametrize(
    ("order", "expected"),
    [("best", [4, 2, 0, 5, 3, 1]), ("worst", [5, 3, 0, 4, 2, 1]), ("rollout", [4, 5, 0, 1, 2, 3])],
)
def test_orders_have_what_has_no_score_last(index: Index, order: str, expected: list[int]) -> None:
    for limit in range(7):
        found = index.find(Filter(data_set=""), order=order, limit=limit)
        assert [entry.sample_index for entry in found] == expected[:limit]


def test_a_file_again_takes_the_place_of_what_was_known_of_it(index: Index, tmp_path: Path) -> None:
    path = tmp_path / file_name(0)
    _write(path, [_row(7, 0.25)])
    index.update()
    assert [(total.rollout, total.samples) for total in index.rollouts()] == [(0, 1), (1, 2)]
    path.unlink()
    index.update()
    assert [entry.sample_index for entry in index.find(Filter())] == [4, 5]


def test_a_frame_that_becomes_too_much_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of what lies before and after it nothing is lost, and no more is unpacked than the limit and one step."""
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    path = tmp_path / file_name(0)
    bomb = zstandard.ZstdCompressor().compress(b"0" * (64 << 20))
    write_file(path, [json_lines([_row(i, 0.5)]) for i in range(3)])
    frames = [frame for frame, _ in read_frames(path)]
    content = path.read_bytes()
    path.write_bytes(content[: frames[1].offset] + bomb + content[frames[1].offset :])
    place = files.Frame(frames[1].offset, len(bomb))
    tracemalloc.start()
    found = dict(read_frames(path))
    with pytest.raises(ValueError, match="unpacks to more than"):
        read_frame(path, place)
    assert tracemalloc.get_traced_memory()[1] < 24 << 20
    tracemalloc.stop()
    assert [len(rows) for rows in found.values()] == [1, 0, 1, 1]
    assert f"{path}: {len(bomb)} bytes from {place.offset} on are left out" in caplog.text
    assert damage(path) is None
    index = Index(tmp_path)
    assert [entry.sample_index for entry in index.find(Filter(), order="file")] == [0, 1, 2]
    monkeypatch.setattr("slime_data.saved._LONGEST", 1 << 20)
    with pytest.raises(DataError, match=r"rollout_0000000\.jsonl\.zst:2: no sample as JSON in 1048576 bytes"):
        saved.read_samples(path)


def test_samples_of_one_execution_are_numbered_where_the_writer_did_not(tmp_path: Path) -> None:
    """Runs from before there were numbers; two data sets of one frame may have the same groups."""
    path = tmp_path / file_name(0, evaluation=True)
    rows = [_row(i, 0.5, data_set=name) for name in "ab" for i in (0, 0, 1)]
    write_file(path, [json_lines(rows)])
    entries = Index(tmp_path).find(Filter(), order="file")
    assert [(e.data_set, *e.key) for e in entries] == [
        (name, index, part) for name in "ab" for index, part in ((0, 0), (0, 1), (1, 0))
    ]


@pytest.mark.parametrize("damage", ["none", "torn", "other bytes", "other form", "places of nothing"])
def test_a_file_whose_footer_is_not_known_is_read_whole(index: Index, tmp_path: Path, damage: str) -> None:
    before = index.find(Filter())
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        if damage == "none":
            path.write_bytes(content[: max(frame.offset + frame.size for frame, rows in read_frames(path) if rows)])
        elif damage == "torn":
            path.write_bytes(content[:-3])
        elif damage == "other bytes":
            path.write_bytes(content[:-20] + bytes(8) + content[-12:])
            assert files.damage(path) is not None
        else:
            footer = files.read_footer(path)
            changed = footer.replace(b'"form":1', b'"form":2') if damage == "other form" else footer[:-1] + b"\x7f"
            lines = [json_lines(rows) for _, rows in read_frames(path) if rows]
            write_file(path, lines, lambda _, changed=changed: changed)
    assert Index(tmp_path).find(Filter()) == before


def test_a_question_reads_each_file_that_it_is_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, read = [file_name(rollout) for rollout in range(4)], list[str]()
    for number, name in enumerate(names):
        _write(tmp_path / files.FOLDER / name, [{**_row(number, 0.5), "prompt": "how many"}])
    footer = files.read_footer
    monkeypatch.setattr("slime_runs.index.read_footer", lambda path: read.append(path.name) or footer(path))
    (found,) = Run(tmp_path).samples(Filter(rollout=2))
    assert (found.entry.sample_index, read) == (2, [names[2]])
    read.clear()
    assert overview(Run(tmp_path))["best"]["rollout"] == 3
    assert sorted(read) == names
