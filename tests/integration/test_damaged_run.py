"""One byte of a run's files is another: a resume names the file and what to type, or needs nothing of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from slime_core.checkpoint.store import find
from slime_core.errors import CheckpointError
from tests.conftest import TinyRun

FLAGS = {"num_rollout": 4, "save_interval": 2, "eval_interval": None, "eval_prompt_data": None}
UNUSED = ("config.yaml", "summary.json", "trace.jsonl", "tensorboard")
"""Of these a resume reads nothing: it writes them anew, or appends."""


@pytest.fixture(scope="module")
def run_dir(tiny: TinyRun, slime: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("whole") / "run"
    slime("train", *tiny.argv(save, **FLAGS))
    return save


def flipped(run_dir: Path, file: Path, folder: Path, bits: int) -> Path:
    """A copy of the run with one byte in the middle of the file changed."""
    copy = folder / "run"
    shutil.copytree(run_dir, copy)
    path = copy / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= bits
    path.write_bytes(content)
    return copy


@pytest.mark.parametrize("bits", [1, pytest.param(0xFF, marks=pytest.mark.slow)])
def test_a_byte_of_any_file_of_the_commit_and_the_ledger_is_noticed(run_dir: Path, tmp_path: Path, bits: int) -> None:
    newest, older = (run_dir / "checkpoints" / f"rollout_000000{n}" for n in (3, 1))
    segments = sorted((run_dir / "checkpoints" / "ledger").iterdir())
    files = [path for path in newest.rglob("*") if path.is_file() and path.stat().st_size] + segments
    assert len(files) > 10
    for number, path in enumerate(files):
        copy = flipped(run_dir, path.relative_to(run_dir), tmp_path / str(number), bits)
        with pytest.raises(CheckpointError) as caught:
            find(copy)
        said = str(caught.value)
        assert path.name in said
        first = path == segments[0]  # of both commits
        assert ("rollout_0000001 is whole: --ckpt-step 1" in said) == (not first), said
        assert (f"rm -r {copy / 'checkpoints' / 'ledger'}, and a new ledger begins" in said) == first, said
        if not first:
            assert find(copy, 1) == copy / "checkpoints" / older.name
        shutil.rmtree(copy)


@pytest.mark.parametrize("bits", [1, pytest.param(0xFF, marks=pytest.mark.slow)])
def test_a_byte_of_the_records_is_noticed(run_dir: Path, tiny: TinyRun, slime: Any, tmp_path: Path, bits: int) -> None:
    files = [path.relative_to(run_dir) for path in run_dir.rglob("*") if path.is_file() and path.stat().st_size]
    records = [path for path in files if not {"checkpoints", *UNUSED} & {*path.parts}]
    assert {"metrics.jsonl", "samples"} <= {path.parts[0] for path in records}
    one_of_each = {path.parts[0]: path for path in records}.values()
    for path in [*one_of_each, Path("checkpoints/latest")]:
        copy = flipped(run_dir, path, tmp_path / path.name, bits)
        done = slime("train", *tiny.argv(copy, **FLAGS | {"num_rollout": 5}, load=copy), check=False)
        assert f"{copy / path}: damaged" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
        assert (done.returncode == 0) == (path.name != "metrics.jsonl")
        if done.returncode:
            assert f"mv {copy / path} {copy / path}.damaged" in done.stderr
            (copy / path).rename(copy / f"{path}.damaged")
            slime("train", *tiny.argv(copy, **FLAGS | {"num_rollout": 5}, load=copy))


def test_a_damaged_store_without_a_whole_commit_says_how_to_start_over(run_dir: Path, tmp_path: Path) -> None:
    copy = flipped(run_dir, Path("checkpoints/rollout_0000003/state.json"), tmp_path, 1)
    shutil.rmtree(copy / "checkpoints" / "rollout_0000001")
    with pytest.raises(
        CheckpointError, match=r"state\.json .*No commit there is whole: rm -r .*checkpoints, and the run"
    ):
        find(copy)
