"""Checkpoints on disk: one atomic commit per save, a `latest` pointer written last.

    <root>/rollout_0000019/           HF layout at the top (config.json, model.safetensors, tokenizer)
        trainer/                      optimizer moments, schedule, RNG
        data_source.json state.json   data cursor with buffer; versions, settings, plugin provenance
        manifest.json                 format, and size and digest of every other file
    <root>/latest                     name of the newest commit

A commit is built in a hidden directory, flushed to disk and renamed; a run killed at any instant leaves either the
whole commit or none of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from slime_core.errors import CheckpointError

FORMAT = "slime-checkpoint-1"
MANIFEST, STATE, LATEST = "manifest.json", "state.json", "latest"
_NAME = re.compile(r"rollout_(\d+)")


class CheckpointStore:
    """The checkpoints of one directory."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def commit(
        self,
        rollout_id: int,
        state: dict[str, Any],
        writers: Sequence[Callable[[Path], None]],
        *,
        keep: int | None = None,
    ) -> Path:
        """Write one checkpoint; `writers` fill the directory they are given.

        Args:
            rollout_id: The last rollout that the weights were trained on.
            state: JSON-able facts, read back by `read_state`.
            writers: Called in order with the directory.
            keep: Afterwards delete all but the newest `keep` commits; None keeps all.

        Raises:
            CheckpointError: The file system refused; earlier commits are intact.
        """
        target = self.root / f"rollout_{rollout_id:07d}"
        partial = self.root / f".partial-{target.name}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for write in writers:
                write(partial)
            _write_json(partial / STATE, {"rollout_id": rollout_id, **state})
            written = [path for path in sorted(partial.rglob("*")) if path.is_file()]
            for path in written:
                # Some writers make files for their owner only; a checkpoint is as readable as its directory's others.
                shutil.copymode(partial / STATE, path)
            files = {str(path.relative_to(partial)): _describe(path) for path in written}
            _write_json(partial / MANIFEST, {"format": FORMAT, "rollout_id": rollout_id, "files": files})
            for path in [*partial.rglob("*"), partial]:
                _flush(path)
            replaced = self.root / f".replaced-{target.name}"
            if target.exists():
                os.rename(target, replaced)
            os.rename(partial, target)
            self._point_to(target.name)
            shutil.rmtree(replaced, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot save to {target}: {error}; earlier checkpoints are intact") from error
        self._prune(keep)
        return target

    def _point_to(self, name: str) -> None:
        partial = self.root / f".{LATEST}.partial"
        partial.write_text(name + "\n", encoding="utf-8")
        _flush(partial)
        os.replace(partial, self.root / LATEST)
        _flush(self.root)

    def rewind(self, commit: Path) -> None:
        """Forget what lies after `commit`: its rollouts are about to be done again."""
        self._point_to(commit.name)
        for path in self.commits():
            if path.name > commit.name:
                shutil.rmtree(path)

    def _prune(self, keep: int | None) -> None:
        if keep is None:
            return
        for path in self.commits()[:-keep]:
            shutil.rmtree(path)

    def commits(self) -> list[Path]:
        """All commits, oldest first."""
        if not self.root.is_dir():
            return []
        return sorted(p for p in self.root.iterdir() if _NAME.fullmatch(p.name) and p.is_dir())

    def latest(self) -> Path | None:
        """The newest commit, verified; None when there is none yet.

        Raises:
            CheckpointError: It is torn or foreign, or `latest` names a commit that is gone.
        """
        commits = self.commits()
        # A run killed between the rename of a commit and the pointer leaves a complete commit that `latest` does not
        # name yet; the newest one is right either way.
        if commits:
            return verify(commits[-1])
        pointer = self.root / LATEST
        if pointer.is_file():
            name = pointer.read_text(encoding="utf-8").strip()
            raise CheckpointError(f"{self.root}: {LATEST} names {name!r}, which is not there")
        return None


def verify(directory: Path) -> Path:
    """The directory, if every file is as the manifest says. Raises CheckpointError naming what is wrong."""
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{directory}: not a slime checkpoint (no {MANIFEST}): torn, or written by something else"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: torn: {error}") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {manifest.get('format')!r}; this version reads {FORMAT!r}")
    for name, described in manifest["files"].items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"{directory}: torn: {name} is missing")
        if _describe(file) != described:
            raise CheckpointError(f"{directory}: torn: {name} is not what was saved (size or digest differs)")
    return directory


def read_state(directory: Path) -> dict[str, Any]:
    """The facts given to `commit`."""
    state: dict[str, Any] = json.loads((directory / STATE).read_text(encoding="utf-8"))
    return state


def is_checkpoint(directory: str | Path) -> bool:
    """Whether this is one commit (not a store of several)."""
    return (Path(directory) / MANIFEST).is_file()


def find(load: str | Path) -> Path | None:
    """The commit that `--load` means: a commit itself, a store, or a run directory with `checkpoints/`.

    None when there is no commit. Raises CheckpointError for a torn or foreign one.
    """
    load = Path(load)
    if is_checkpoint(load):
        return verify(load)
    for root in (load, load / "checkpoints"):
        found = CheckpointStore(root).latest()
        if found is not None:
            return found
    return None


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    return {"size": path.stat().st_size, "blake2b": digest.hexdigest()}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    """Have the kernel write file or directory entry to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
