"""The run directory: `config.yaml`, `summary.json`, `metrics.jsonl`, and which one may be written to.

`metrics.jsonl` has one line per rollout. On resume the lines after the checkpoint are cut off, so the file reads as if
the run had never been interrupted.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Collection, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from slime_core.distributions import BUNDLE, CORE, installed
from slime_core.errors import CheckpointError, ConfigError, RecordError
from slime_core.files import CHECKPOINTS, CONFIG, HEADER, OUTPUT, RUN_FILES, SUMMARY, replace_file
from slime_core.plugins.hookspecs import hookimpl
from slime_core.protocols import Args

__all__ = ["CHECKPOINTS", "CONFIG", "OUTPUT", "RUN_FILES", "SUMMARY"]
_READ = ("hf_checkpoint", "ref_load", "critic_load", "opd_teacher_load", "prompt_data", "load")
"""Settings whose files a new run reads."""


def run_dir_of(args: Args) -> Path:
    """Return the run's directory, which the settings' rules have filled in."""
    assert args.run_dir, "every command that writes has a run directory"
    return Path(args.run_dir)


def check_run_dir(args: Args, *, resume: bool) -> list[Path]:
    """Return the files and folders of a run that exist in `--run-dir` and in `--save`.

    Args:
        args: The run's settings.
        resume: They belong to this run, which continues.

    Raises:
        ConfigError: They belong to another run, which may be neither continued nor overwritten.
    """
    run_dir = run_dir_of(args)
    commits = Path(args.save or run_dir) / CHECKPOINTS
    places = dict.fromkeys((*(run_dir / name for name in RUN_FILES), commits))
    used = [path for path in places if path.exists()]
    if resume:
        return used
    another = f"choose another {'--save' if args.save else '--run-dir'}"
    if not args.overwrite:
        check_dumps(args)
    if used and not args.overwrite:
        go_on = f"Continue it with --load {commits.parent}," if commits in used else "No checkpoint is there to load:"
        raise ConfigError(
            f"{used[0].parent} already holds a run ({', '.join(path.name for path in used)}). {go_on}"
            f" start over with --overwrite, or {another}"
        )
    if foreign := [path for path in used if not _is_of_run(path)]:
        raise ConfigError(
            f"{', '.join(map(str, foreign))}: slime cannot tell that a run made this ({foreign[0].parent} has no"
            f" {CONFIG} of slime), so --overwrite does not touch it; {another}"
        )
    for name in _READ:
        named = Path(getattr(args, name, None) or os.devnull).resolve()
        if any(path.resolve() in (named, *named.parents) for path in used):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {named} is part of the run that --overwrite would replace; {another}")
    return used


def _is_of_run(path: Path) -> bool:
    """Return whether slime made a run's file or folder: slime's `config.yaml` is next to it, or commits are in it.

    A run that was killed while its processes started has their output alone.
    """
    config = path.parent / CONFIG
    if config.is_file():
        return config.read_text(encoding="utf-8", errors="replace").startswith(HEADER)
    return path.name in OUTPUT or (path.name == CHECKPOINTS and (path / "latest").is_file())


def check_dumps(args: Args) -> None:
    """Raise ConfigError if the first file of samples or batches that the run would write is there already."""
    for name in ("save_debug_rollout_data", "save_debug_train_data"):
        template = getattr(args, name, None)
        if template and (path := Path(template.format(rollout_id=args.start_rollout_id or 0))).exists():
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {template}: {path} is there already; --overwrite writes over it")


def check_there(run_dir: Path, cause: BaseException | None = None) -> None:
    """Raise RecordError if the directory has been moved or removed since the run began."""
    if not run_dir.is_dir():
        raise RecordError(
            f"{run_dir} has been moved or removed while the run wrote to it. If it was moved, the same command with"
            " --run-dir and --load of the new place continues from its last commit"
        ) from cause


def write_text(path: Path, text: str) -> None:
    """Replace the file, complete or not at all. Raises RecordError."""
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error}. Checkpoints are intact") from error


def write_summary(run_dir: Path, summary: Mapping[str, object]) -> None:
    """Write `summary.json`."""
    write_text(run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")


def versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    import torch
    import transformers

    from slime_core import __version__

    bundle = installed(BUNDLE)
    return {
        CORE: __version__,
        **({BUNDLE: bundle.version} if bundle else {}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


FILE = "metrics.jsonl"


class JsonlTracker:
    """A tracker that appends metrics as JSON lines."""

    def __init__(self) -> None:
        self._file: FileIO | None = None
        self._goes_on = False
        self._written, self._known = hashlib.blake2b(digest_size=16), 0
        """Hash and count of the file's first `_known` bytes, which later commits do not read again."""

    @hookimpl
    def slime_run_start(self, args: Args, run_dir: Path) -> None:
        """Open the file. A resumed run keeps all complete lines until `cut_after`: the resume may still fail."""
        path = run_dir / FILE
        content = path.read_bytes() if args.start_rollout_id and path.is_file() else b""
        self._goes_on = bool(content)
        replace_file(path, content[: content.rfind(b"\n") + 1])  # without a last line that a kill cut
        # Not buffered: a failed write must not be repeated when the file is closed.
        self._file = path.open("ab", buffering=0)

    @hookimpl
    def slime_log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line; `step` counts finished rollouts."""
        if self._file is not None:
            _append(self._file, orjson.dumps({"step": step, **metrics}, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    @hookimpl
    def slime_save_state(self) -> dict[str, object]:
        """Return size and hash of the file up to the commit, so that damage can be detected."""
        if self._file is None:
            return {}
        with Path(str(self._file.name)).open("rb") as file:
            file.seek(self._known)
            self._written.update(file.read())
            self._known = file.tell()
        os.fsync(self._file.fileno())
        return {FILE: {"size": self._known, "blake2b": self._written.hexdigest()}}

    @hookimpl
    def slime_load_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if the run's file differs from the commit's record."""
        known = state.get(FILE)
        if known is None or not self._goes_on or self._file is None:
            return
        path = Path(str(self._file.name))
        content = path.read_bytes()[: known["size"]]
        if hashlib.blake2b(content, digest_size=16).hexdigest() != known["blake2b"]:
            raise CheckpointError(
                f"{path}: damaged: it differs from the record that the commit was made with. To continue without the"
                f" metrics so far: mv {path} {path}.damaged"
            )

    @hookimpl
    def slime_run_end(self, error: BaseException | None) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _append(file: FileIO, line: bytes) -> None:
    """Append one line. Raises RecordError if the disk is full or the file has been deleted."""
    try:
        written = file.write(line)
    except OSError as error:
        raise RecordError(f"{file.name} cannot be written: {error}. Checkpoints are intact: make space") from error
    if written != len(line):
        raise RecordError(f"{file.name}: no space for a step's metrics. Checkpoints are intact: make space")
    if os.fstat(file.fileno()).st_nlink == 0:
        raise RecordError(
            f"{file.name} has been removed while the run wrote to it. If its directory still has commits, resume with"
            " --load; else start again"
        )


def cut_after(run_dir: Path, step: int, unfinished: Collection[int] = ()) -> None:
    """Cut off the lines after `step` finished rollouts. A tracker that has the file open appends after the cut.

    Args:
        run_dir: Directory of the run.
        step: Step from which the run resumes.
        unfinished: Steps whose evaluations will be done (again): lines after the step's own line belong to them.
    """
    path = run_dir / FILE
    if not path.is_file():
        return
    kept, seen = 0, set()
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            found = orjson.loads(line)["step"]
        except (orjson.JSONDecodeError, LookupError, TypeError) as error:
            raise CheckpointError(f"{path}: damaged: {error}. To go on: mv {path} {path}.damaged") from error
        if found > step or (found in seen and found in unfinished):
            break
        seen.add(found)
        kept += len(line)
    os.truncate(path, kept)
