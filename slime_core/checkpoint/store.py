"""Checkpoints on disk: one atomic commit per save, a `latest` pointer written last.

    <root>/rollout_0000019/           HF layout at the top (config.json, model.safetensors, tokenizer)
        trainer/                      optimizer moments, schedule, RNG
        data_source.json state.json   data cursor with buffer; versions, settings, plugin provenance
        ledger.json                   every open group, and the newest segment of <root>/ledger
        manifest.json                 format, size and digest of every other file, and its own digest
    <root>/ledger/                    the fate of every prompt group (`data.ledger_files`), shared by the commits
    <root>/latest                     name of the newest commit

A commit is built in a hidden directory, flushed to disk and renamed. A run killed at any instant leaves either the
whole commit or none of it. A rewritten commit (the run ended early inside the next rollout) is a new directory whose
name ends in a number, `rollout_0000019.01`. The commit that it replaces is deleted once the new one is complete.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from slime_core.data.ledger_files import SEGMENTS, SegmentRef, read_chain, read_commit, remove_orphans, segments_of
from slime_core.errors import CheckpointError, rollout_name
from slime_core.files import flush, read_regular, replace_file

logger = logging.getLogger(__name__)

FORMAT = "slime-checkpoint-1"
MANIFEST, STATE, LATEST = "manifest.json", "state.json", "latest"
_NAME = re.compile(r"rollout_(\d+)(\.\d+)?")
_PARTIAL = ".partial-"
"""Prefix of the name of a commit that is being written or deleted."""
_OWN = "digest"
"""Manifest entry that holds the digest of the other entries."""
_MOST_TIMES = 100
"""Limit on rewrites of a commit; the two-digit suffix must sort by name."""


class CheckpointStore:
    """The checkpoints of one directory."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._has_pruned = False

    def commit(
        self,
        rollout_id: int,
        state: Mapping[str, object],
        writers: Sequence[Callable[[Path], None]],
        *,
        keep: int | None = None,
        spared: Collection[int] = (),
    ) -> Path:
        """Write one checkpoint; `writers` fill the directory they are given.

        Args:
            rollout_id: The last rollout that the weights were trained on.
            state: JSON-able facts, read back by `read_state`.
            writers: Called in order with the directory.
            keep: Afterwards delete all but the newest `keep` commits; None or 0 keeps all.
            spared: Rollouts whose commits are kept, too.

        Raises:
            CheckpointError: The file system refused; earlier commits are intact.
        """
        # Several if a run was killed while it rewrote a commit.
        before = [path for path in self.commits() if rollout_of(path) == rollout_id]
        target = self._next(rollout_id, before)
        partial = self.root / f"{_PARTIAL}{target.name}"
        try:
            if partial.exists():
                _remove_commit(partial)
            partial.mkdir(parents=True)
            for write in writers:
                write(partial)
            _write_json(partial / STATE, {"rollout_id": rollout_id, **state})
            written = [path for path in sorted(partial.rglob("*")) if path.is_file()]
            for path in written:
                # Some writers make files readable by their owner only; give all files the same permissions.
                shutil.copymode(partial / STATE, path)
            files = {str(path.relative_to(partial)): _describe(path) for path in written}
            manifest = {"format": FORMAT, "rollout_id": rollout_id, "files": files}
            _write_json(partial / MANIFEST, {**manifest, _OWN: _digest(manifest)})
            for path in [*partial.rglob("*"), partial]:
                flush(path)
            os.rename(partial, target)
            self._point_to(target.name)
            for path in before:
                _remove_commit(path)
        except (CheckpointError, OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)  # the disk may be full
            if isinstance(error, CheckpointError):
                raise
            full = not isinstance(error, OSError) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            way_out = "earlier checkpoints are intact" + (": make space there" if full else "")
            raise CheckpointError(f"cannot save to {target}: {error}; {way_out}") from error
        self._prune(keep, spared)
        return target

    def _next(self, rollout_id: int, before: list[Path]) -> Path:
        """Return the directory of the next commit after a rollout. Raises CheckpointError after too many rewrites."""
        target = self.root / f"rollout_{rollout_id:07d}"
        if not before:
            return target
        times = int(before[-1].suffix.removeprefix(".") or 0) + 1
        if times == _MOST_TIMES:
            raise CheckpointError(f"{before[-1]}: has been made again {times - 1} times; rename it to {target.name}")
        return target.with_suffix(f".{times:02d}")

    def _point_to(self, name: str) -> None:
        replace_file(self.root / LATEST, f"{name}\n".encode(), durable=True)

    def rewind(self, commit: Path, *, keep: int | None = None, spared: Collection[int] = ()) -> None:
        """Delete all commits after `commit`, whose rollouts are about to be repeated.

        Ledger segments that no commit needs are deleted, too: segments of later commits, and a segment that a killed
        run wrote for a commit that it did not complete.

        Args:
            commit: The commit to resume from.
            keep: As in method `commit`: a run killed right after a commit has not deleted the oldest one yet.
            spared: As in method `commit`.

        Raises:
            CheckpointError: The file system refused; `commit` is intact.
        """
        try:
            self._point_to(commit.name)
            older = [path for path in self.commits() if rollout_of(path) < rollout_of(commit)]
            for path in [*self.root.glob(f"{_PARTIAL}rollout_*"), *reversed(self.commits())]:
                if path not in (*older, self.root / commit.name):
                    _remove_commit(path)
            ledgers = [read_commit(path) for path in self.commits()]
            remove_orphans(self.root / SEGMENTS, [SegmentRef.of(found["segment"]) for found in ledgers if found])
        except OSError as error:
            raise CheckpointError(f"cannot go on from {commit}: {error}; it is intact") from error
        self._prune(keep, spared)

    def _prune(self, keep: int | None, spared: Collection[int]) -> None:
        """Delete old commits. A commit that cannot be deleted only costs space, so it is logged and kept."""
        old = [path for path in self.commits()[: -keep if keep else 0] if rollout_of(path) not in spared]
        if old and not self._has_pruned:
            self._has_pruned = True
            rule = f"the newest {keep} stay, and the best by each evaluation; --keep-checkpoints 0 keeps all"
            print(f"deleting old checkpoints: {rule}", flush=True)
        for path in old:
            try:
                _remove_commit(path)
            except OSError as error:
                logger.warning("%s is not needed any more (--keep-checkpoints) and cannot be deleted: %s", path, error)

    def commits(self) -> list[Path]:
        """Return all commits, oldest first."""
        if not self.root.is_dir():
            return []
        return sorted(p for p in self.root.iterdir() if _NAME.fullmatch(p.name) and p.is_dir())

    def at(self, rollout_id: int) -> Path:
        """Return the commit after a rollout, not verified. Raises CheckpointError that lists the existing rollouts."""
        commits = {rollout_of(path): path for path in self.commits()}
        if rollout_id not in commits:
            there = ", ".join(path.name for path in commits.values()) or "none"
            raise CheckpointError(
                f"{self.root}: no commit rollout_{rollout_id:07d} (after {rollout_name(rollout_id)});"
                f" there are: {there}"
            )
        return commits[rollout_id]

    def latest(self) -> Path | None:
        """Return the newest commit, verified, or None if the store has no commit yet.

        Raises:
            CheckpointError: The commit is torn or foreign, or `latest` names a missing commit.
        """
        commits = self.commits()
        # A run killed between the rename of a commit and the pointer leaves a complete commit that `latest` does not
        # name yet. The newest commit is right in either case.
        pointer = self.root / LATEST
        try:
            name = read_regular(pointer, 4096).decode(errors="replace").strip() if pointer.is_file() else ""
        except OSError as error:
            raise CheckpointError(f"{pointer}: cannot be read: {error.strerror}") from error
        if commits:
            if name and all(name != commit.name for commit in commits):
                said = "%s: damaged: it names %r, which is not there; %s is the newest commit"
                logger.warning(said, pointer, name, commits[-1].name)
            return verify(commits[-1])
        if name:
            raise CheckpointError(f"{self.root}: {LATEST} names {name!r}, which is not there")
        return None

    def way_out(self, damaged: CheckpointError) -> CheckpointError:
        """Return the error of a damaged commit, extended by the option or command that helps."""
        for path in reversed(self.commits()):
            try:
                verify(path)
            except CheckpointError:
                continue
            return CheckpointError(f"{damaged}. {path.name} is whole: --ckpt-step {rollout_of(path)}")
        first = self.root / SEGMENTS if "ledger segment" in str(damaged) else self.root
        then = "a new ledger begins" if first.name == SEGMENTS else "the run starts over"
        return CheckpointError(f"{damaged}. No commit there is whole: rm -r {first}, and {then}")


def _remove_commit(commit: Path) -> None:
    """Delete a commit; files that others have added to it are kept next to it. Raises OSError."""
    if not commit.name.startswith("."):
        partial = commit.with_name(f"{_PARTIAL}{commit.name}")
        if partial.exists():  # left by a killed process
            _remove_commit(partial)
        commit = commit.rename(partial)
    is_ours = lambda name: bool(in_commit(commit.parent, f"{commit.name}/{name}"))  # noqa: E731
    remove_made(commit, is_ours, commit.with_name(f"kept-{commit.name.removeprefix(_PARTIAL)}"))


def in_commit(root: Path, name: str) -> bool | None:
    """Return whether a commit below `root` has written the file; None if the file is in no commit.

    In an incomplete commit, every file counts as written by it.
    """
    commit, _, file = name.partition("/")
    if not file or not _NAME.fullmatch(commit.removeprefix(_PARTIAL)):
        return None
    try:
        return file in (MANIFEST, *read_manifest(root / commit)["files"])
    except CheckpointError:
        return True


def remove_made(directory: Path, is_ours: Callable[[str], bool], kept: Path) -> None:
    """Delete a directory; move foreign files (`is_ours(relative path)` is False) to `kept`.

    Raises:
        OSError: The file system refused.
    """
    files = [path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()]
    foreign = [name for path in files if not is_ours(name := path.relative_to(directory).as_posix())]
    if foreign:
        suffixes = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
        kept = next(free for suffix in suffixes if not (free := kept.with_name(kept.name + suffix)).exists())
        for name in foreign:
            (kept / name).parent.mkdir(parents=True, exist_ok=True)
            os.rename(directory / name, kept / name)
        logger.warning("%s: slime did not write these files, so they are kept there: %s", kept, ", ".join(foreign[:9]))
    shutil.rmtree(directory)


def rollout_of(commit: Path) -> int:
    """Return the rollout after which a commit was made; a rewritten commit counts, too (`rollout_0000007.01`)."""
    return int(commit.stem.removeprefix("rollout_"))


def verify(directory: Path) -> Path:
    """Return the directory if every file matches the manifest and the ledger matches the commit.

    Raises:
        CheckpointError: A file is missing or changed; the message names it.
    """
    for name, described in read_manifest(directory)["files"].items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"{directory}: torn: {name} is missing")
        if file.stat().st_size != described["size"] or _describe(file) != described:
            raise CheckpointError(f"{directory}: torn: {name} is not what was saved (size or digest differs)")
    ledger = read_commit(directory)
    if ledger is not None:
        last, segments = SegmentRef.of(ledger["segment"]), segments_of(directory)
        if (segments / last.name).is_file():  # if it is elsewhere, a new ledger begins (`rollout.state`)
            read_chain(segments, last)
    return directory


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest of a commit. Raises CheckpointError if it is missing, torn or of another format."""
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{directory}: not a slime checkpoint (no {MANIFEST}): torn, or written by something else"
        )
    try:
        manifest: dict[str, object] = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:  # no JSON, no text, or no file of a run
        raise CheckpointError(f"{path}: torn: {error}") from error
    own = manifest.pop(_OWN, None)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {manifest.get('format')!r}; this version reads {FORMAT!r}")
    if own != _digest(manifest):
        raise CheckpointError(f"{path}: torn: it is not what was saved (its digest differs)")
    return manifest


def read_state(directory: Path) -> dict[str, Any]:
    """Read the state that was given to `CheckpointStore.commit`."""
    state: dict[str, object] = json.loads(read_regular(directory / STATE))
    return state


def is_checkpoint(directory: str | Path) -> bool:
    """Return whether the directory is one commit (not a store of several)."""
    return (Path(directory) / MANIFEST).is_file()


def find(load: str | Path, step: int | None = None) -> Path | None:
    """Find the commit that `--load` names.

    Args:
        load: A commit, a store of commits, or a run directory with `checkpoints/`.
        step: `--ckpt-step`: the number of a rollout; None chooses the newest commit.

    Returns:
        The commit, verified; None if the directory holds no commit.

    Raises:
        CheckpointError: The commit is torn or foreign, or no commit has that number.
    """
    load = Path(load)
    if is_checkpoint(load):
        if step is not None:
            raise CheckpointError(
                f"{load}: is one commit, so there is no step {step} to choose; name its run directory"
            )
        return verify(load)
    for store in (CheckpointStore(load), CheckpointStore(load / "checkpoints")):
        chosen = store.at(step) if step is not None and store.commits() else None
        try:
            found = verify(chosen) if chosen else store.latest()
        except CheckpointError as error:
            raise store.way_out(error) from error
        if found is not None:
            return found
    return None


def _digest(manifest: Mapping[str, object]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()


def _describe(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    return {"size": path.stat().st_size, "blake2b": digest.hexdigest()}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
