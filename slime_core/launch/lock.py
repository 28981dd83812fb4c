"""The one writer of a run directory: its lock, and the earlier run that `--overwrite` replaces.

The kernel releases a lock when its holder dies, however it dies. An earlier run is replaced in renames, so that a kill
at any moment loses nothing; the next command in the directory finishes what was begun::

    RUN_DIR/.replacing     some of the earlier run's entries; the others are still in their places
    RUN_DIR/.replaced      all of them, until the new run has its first record, or ends without one
    RUN_DIR/.dropped       entries being deleted: of the earlier run, or of a new run that ended without a record
    RUN_DIR/kept           files among them that slime did not write
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from slime_core.checkpoint.run_dir import CHECKPOINTS, FILE, RUN_FILES, SUMMARY, check_run_dir, run_dir_of
from slime_core.checkpoint.store import in_commit, remove_made
from slime_core.errors import ConfigError
from slime_core.protocols import Args

_POLL = 0.1
_MOVING, _MOVED, _DROPPED = ".replacing", ".replaced", ".dropped"
_MADE = (
    "checkpoints/latest", "checkpoints/ledger/*", "tensorboard/events.out.*", "weights/weight_v*", "weights/.*",
    "weights/slime_weights.json", "local_weights/*", "rollouts/rollout_*.jsonl", "eval/state.json", "eval/*.jsonl",
    "failures/*.json", "samples/*_[0-9]*.jsonl.zst", "actors/*.log", "engines/*", "stalls/*.txt",
    "profile/trace.json", "*/.*.partial",
)  # fmt: skip
"""Files that slime writes into the folders of a run, besides commits."""
_RECORDS = (FILE, "eval.json", "eval/*.jsonl", "rollouts/*.jsonl")


@contextmanager
def sole_writer(args: Args) -> Iterator[None]:
    """Hold the run directory's lock: two runs in one directory would mix their checkpoints and metrics.

    Raises:
        ConfigError: Another run holds it.
    """
    run_dir = run_dir_of(args)
    refusal = f"{run_dir}: another run is writing here; choose another"
    with file_lock(run_dir / ".lock", deadline=0.0, refusal=refusal):
        settle_replaced(args)
        try:
            yield
        finally:
            settle_replaced(args)


def finish_replacing(args: Args) -> None:
    """Finish the replacement that a killed run had begun. Raises ConfigError if another run holds the lock."""
    if any((place / name).is_dir() for place in _places(args) for name in (_MOVING, _MOVED, _DROPPED)):
        with sole_writer(args):
            pass


def open_run_dir(args: Args, *, resume: bool) -> None:
    """Create the run directory, after moving aside another run that may be overwritten. The lock is held.

    Args:
        args: The run's settings.
        resume: The records there belong to this run, which continues.

    Raises:
        ConfigError: The directory holds a run that must not be touched, or cannot be written.
    """
    used, run_dir = check_run_dir(args, resume=resume), run_dir_of(args)
    try:
        if resume:  # a summary is of a finished run
            (run_dir / SUMMARY).unlink(missing_ok=True)
            for name in RUN_FILES:
                for left in [*run_dir.glob(f".{name}.*.partial"), *run_dir.glob(f"{name}/.*.partial")]:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()  # a process was killed while it wrote it
        else:
            _move_aside(used)
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write the run directory {run_dir}: {error}") from error


def settle_replaced(args: Args) -> None:
    """Delete the run that was moved aside if the new one has a record; else put it back."""
    places = _places(args)
    _delete_dropped(places)
    moved = [place for place in places if (place / _MOVED).is_dir()]
    records = (path for pattern in _RECORDS for path in run_dir_of(args).glob(pattern))
    if any(path.stat().st_size for path in records):
        for place in moved:
            os.rename(place / _MOVED, place / _DROPPED)
    else:
        for place in moved:
            _move([place / name for name in RUN_FILES], place / _DROPPED)
        for place in moved:
            os.rename(place / _MOVED, place / _MOVING)
    for aside in [place / _MOVING for place in places if (place / _MOVING).is_dir()]:
        _move(list(aside.iterdir()), aside.parent)
        aside.rmdir()
    _delete_dropped(places)


def _places(args: Args) -> list[Path]:
    """Return the directories that hold the run's entries: the run directory and that of `--save`."""
    return list(dict.fromkeys((run_dir_of(args), Path(args.save or run_dir_of(args)))))


def _move_aside(used: list[Path]) -> None:
    places = dict.fromkeys(path.parent for path in used)
    for place in places:
        _move([path for path in used if path.parent == place], place / _MOVING)
    for place in places:
        os.rename(place / _MOVING, place / _MOVED)


def _move(paths: list[Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in paths:
        if path.exists():
            os.rename(path, folder / path.name)


def _delete_dropped(places: list[Path]) -> None:
    for place in places:
        if (dropped := place / _DROPPED).is_dir():
            remove_made(dropped, partial(_is_made, dropped), place / "kept")


def _is_made(run: Path, name: str) -> bool:
    """Return whether slime writes a file of that path in a run directory."""
    top, _, below = name.partition("/")
    made = in_commit(run / top, below) if top == CHECKPOINTS else None
    return made if made is not None else not below or any(fnmatch(name, pattern) for pattern in _MADE)


@contextmanager
def file_lock(path: Path, *, deadline: float, refusal: str) -> Iterator[None]:
    """Hold the lock, waiting up to `deadline` seconds for it. Raises ConfigError with `refusal` after that."""
    end = time.monotonic() + deadline
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a")  # a file of another's that has this name keeps its content
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    with opened as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise ConfigError(f"{refusal} (lock {path}{_holders(path)})") from None
                time.sleep(_POLL)
            except OSError as error:  # some cluster file systems have no locks
                raise ConfigError(f"{path} cannot be locked: {error}; choose another file system") from error
        yield


def _holders(path: Path) -> str:
    """Return, for a message, the processes of this host that have the file open, if this user may see them."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(file.path == str(path.resolve()) for file in process.open_files()):
                found.append(f"process {process.pid}: {shlex.join(process.cmdline())}")
        except psutil.Error:  # it has ended, or is another user's
            continue
    return "; held by " + "; ".join(found) if found else "; held by another user's process, or on another host"
