"""Samples saved and read back: exactly, in order, from either tool, and with errors that name file and line."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from slime_data.saved import read_samples, subsample
from slime_runs.files import write_file

from slime_core.data.dumps import write_lines, write_samples
from slime_core.errors import DataError
from slime_core.sample import Sample


class _NotAPlainValue:
    """Nobody can have told torch that it is safe, as libraries do for `pathlib.Path`."""


def _sample(index: int, group: int | None = 0, **more) -> Sample:
    sample = Sample(index=index, group_index=group, tokens=[1, 2], reward=1 / 3, label={"a": [1]}, **more)
    meta = {"finish_reason": {"type": "length"}, "weight_version": str(index)}
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-0.1, -1 / 7], meta_info=meta, text="x\u2028y\n")
    return sample


def test_round_trip_is_exact_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "0.jsonl"
    samples = [_sample(3, 1, train_metadata={"k": 1.5}), _sample(1, 0, remove_sample=True), _sample(2, 0)]
    write_samples(path, samples)
    assert [s.to_dict() for s in read_samples(path)] == [s.to_dict() for s in samples]
    assert [p.name for p in path.parent.iterdir()] == ["0.jsonl"]


def test_files_of_thudm_slime_are_read_without_running_what_they_hold(tmp_path: Path) -> None:
    rows = [{**_sample(0).to_dict(), "trace": {"events": []}}]
    torch.save({"rollout_id": 0, "samples": rows}, tmp_path / "0.pt")
    (sample,) = read_samples(tmp_path / "0.pt")
    assert sample.rollout_log_probs == [-0.1, -1 / 7]
    assert sample.trace == {"events": []}
    torch.save({"samples": [_NotAPlainValue()]}, tmp_path / "1.pt")
    with pytest.raises(DataError, match=r"1\.pt: not a rollout of THUDM/slime that can be read safely"):
        read_samples(tmp_path / "1.pt")
    torch.save([1], tmp_path / "2.pt")
    with pytest.raises(DataError, match=r"2\.pt: expected .*found list"):
        read_samples(tmp_path / "2.pt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no samples in it"),
        ("{}\n{not json", r":2: no sample as JSON"),
        ('{"tokens": [1], "response_length": 2}', r"sample 1: .*response_length 2 exceeds 1 tokens"),
        ('{"status": "lost"}', r"sample 1: .*lost"),
        ("3", "sample 1"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "0.jsonl").write_text(text)
    with pytest.raises(DataError, match=rf"0\.jsonl.*{message}"):
        read_samples(tmp_path / "0.jsonl")


@pytest.mark.parametrize(
    ("count", "ratio", "kept"),
    [(8, 0.5, [0, 1, 6, 7]), (8, 0.4, [0, 6, 7]), (8, 1.0, list(range(8))), (3, 0.1, [2]), (2, 0.5, [1])],
)
def test_subsample_keeps_head_and_tail_groups(count: int, ratio: float, kept: list[int]) -> None:
    groups = [[_sample(2 * g, g), _sample(2 * g + 1, g)] for g in range(count)]
    assert [g[0].group_index for g in subsample(groups, ratio)] == kept


def _write_often(path: Path) -> None:
    for _ in range(60):
        write_lines(path, [b"{}"])
        write_file(path.with_suffix(".zst"), [b"{}\n"])


def test_processes_that_share_a_model_may_write_the_same_file(tmp_path: Path) -> None:
    """Data-parallel rank 0 is several processes if tensor or pipeline peers share its model."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        list(pool.map(_write_often, [tmp_path / "same.jsonl"] * 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["same.jsonl", "same.zst"]
