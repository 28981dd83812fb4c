"""`--save-hf`: the model of a commit beside it, whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from slime_runs import save_hf as export
from slime_runs.save_hf import export_hf

from slime_core.checkpoint.store import CheckpointStore
from slime_core.errors import CheckpointError


def _commit(root: Path, rollout_id: int = 0) -> Path:
    def write(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(b"w%d" % rollout_id)
        (directory / "data_source.json").write_text("{}")
        (directory / "trainer").mkdir()
        (directory / "trainer" / "state.json").write_text("{}")

    return CheckpointStore(root / "checkpoints").commit(rollout_id, {}, [write])


def test_only_the_model_is_copied_and_a_newer_one_replaces_it(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "hf"
    export_hf(_commit(tmp_path), target)
    exported = [".slime_export.json", "config.json", "model.safetensors"]
    assert sorted(p.name for p in target.iterdir()) == exported
    export_hf(_commit(tmp_path, 1), target)
    assert (target / "model.safetensors").read_bytes() == b"w1"
    assert sorted(p.name for p in target.iterdir()) == exported
    assert [p.name for p in target.parent.iterdir()] == ["hf"]


def test_what_others_add_to_an_export_is_kept_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "hf"
    export_hf(_commit(tmp_path), target)
    (target / "README.md").write_text("mine")
    export_hf(_commit(tmp_path, 1), target)
    assert (tmp_path / "hf-kept" / "README.md").read_text() == "mine"
    assert (target / "model.safetensors").read_bytes() == b"w1"


@pytest.mark.parametrize("file", ["chapter1.tex", "config.json", "model.safetensors"])
def test_another_directory_is_not_replaced(tmp_path: Path, file: str) -> None:
    target = tmp_path / "thesis"
    target.mkdir()
    (target / file).write_text("mine")
    with pytest.raises(CheckpointError, match=r"--save-hf .*thesis is there already, and slime did not export it"):
        export_hf(_commit(tmp_path), target)
    assert [(p.name, p.read_text()) for p in target.iterdir()] == [(file, "mine")]


@pytest.mark.parametrize("killed_at", range(12))
def test_a_kill_while_an_export_is_replaced_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    target = tmp_path / "hf"
    first, second = _commit(tmp_path), _commit(tmp_path, 1)
    export_hf(first, target)
    (target / "README.md").write_text("mine")
    left = [killed_at]

    def counted(do: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            return do(*args, **kwargs)

        return counting

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        for name in ("rename", "mkdir", "unlink"):
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(export.shutil, "rmtree", counted(export.shutil.rmtree))
        export_hf(second, target)
    export_hf(second, target)
    assert (target / "model.safetensors").read_bytes() == b"w1"
    assert [path.read_text() for path in tmp_path.rglob("README.md")] == ["mine"]


def test_a_copy_that_fails_leaves_the_last_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "hf"
    export_hf(_commit(tmp_path), target)

    def full(source: Path, into: Path) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(export.shutil, "copyfile", full)
    with pytest.raises(CheckpointError, match=r"No space left.*rollout_0000001 is intact"):
        export_hf(_commit(tmp_path, 1), target)
    assert (target / "model.safetensors").read_bytes() == b"w0"
