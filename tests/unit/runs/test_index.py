"""The index of kept samples: orders, totals, filters and the time that a question may take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from slime_runs.files import file_name, write_file
from slime_runs.index import Filter, Index, facts


def _row(index: int, score: float | None, *, fate: str = "trained", data_set: str | None = None) -> dict[str, Any]:
    return {
        "index": index, "group_index": index // 2, "row": index % 3,
        "tokens": [1] * (index + 2), "response_length": index + 1,
        "status": "completed" if score is not None else "failed",
        "kept": {"fate": fate, "data_set": data_set, "score": score},
    }  # fmt: skip


def _write(index: Index, path: Path, rows: list[Any]) -> None:
    frames = write_file(path, [[orjson.dumps(row) for row in rows]])
    index.add_file(path, zip(frames, [[facts(row) for row in rows]]))


@pytest.fixture
def index(tmp_path: Path) -> Index:
    found = Index.to_write(tmp_path)
    rollouts = {
        0: [_row(0, 0.5), _row(1, None), _row(2, 1.0), _row(3, 0.0, fate="dropped")],
        1: [_row(4, 1.0), _row(5, 0.0)],
    }
    for rollout, rows in rollouts.items():
        path = tmp_path / file_name(rollout)
        _write(found, path, rows)
    return found


@pytest.mark.parametrize(
    ("order", "expected"),
    [("best", [4, 2, 0, 5, 3, 1]), ("worst", [5, 3, 0, 4, 2, 1]), ("rollout", [4, 5, 0, 1, 2, 3])],
)
def test_orders_have_what_has_no_score_last(index: Index, order: str, expected: list[int]) -> None:
    for limit in range(7):
        found = index.find(Filter(data_set=""), order=order, limit=limit)
        assert [entry.sample_index for entry in found] == expected[:limit]


def test_totals_are_of_what_was_trained_on(index: Index) -> None:
    first, second = index.rollouts()
    assert (first.samples, first.score, first.dropped, first.failed, first.tokens) == (4, 0.75, 1, 1, 1 + 2 + 3 + 4)
    assert (second.samples, second.score) == (2, 0.5)
    assert index.size() == 6
    assert index.evaluations() == []


def test_a_file_again_takes_the_place_of_what_was_known_of_it(index: Index, tmp_path: Path) -> None:
    rows = [_row(7, 0.25)]
    path = tmp_path / file_name(0)
    _write(index, path, rows)
    assert [(total.rollout, total.samples) for total in index.rollouts()] == [(0, 1), (1, 2)]
    index.drop(path.name)
    assert index.size() == 2


def test_filters_by_row_and_length(index: Index) -> None:
    assert [entry.sample_index for entry in index.find(Filter(data_row=1))] == [4, 1]
    assert [entry.sample_index for entry in index.find(Filter(min_tokens=2, max_tokens=4))] == [1, 2, 3]


def test_a_question_ends_in_time(tmp_path: Path) -> None:
    index, path = Index.to_write(tmp_path), tmp_path / file_name(0)
    rows = [_row(i, 0.5) for i in range(2000)]
    _write(index, path, rows)
    assert len(index.find(Filter(), within=60.0)) == 2000
    assert len(index.find(Filter(), within=0.0)) < 2000
    assert len(index.find(Filter())) == 2000
