"""`--save-hf`: the model of a checkpoint as a directory of its own, without what only slime reads.

The journal calls this after each commit. A commit is an HF-layout directory already, so this is a copy; it is built
beside its target and renamed, so that a reader finds the old export or the new one, never half of one. A file in an
export lists what slime wrote: nothing else is ever replaced.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from slime_core.checkpoint.store import remove_made
from slime_core.errors import CheckpointError
from slime_core.models.hf_io import INDEX, copy_assets, weight_files

_MARK = ".slime_export.json"


def copy_model(source: str | Path, target: str | Path) -> None:
    """Copy a model: configuration, tokenizer and weights, and no other file."""
    copy_assets(source, target)
    for path in (*weight_files(source), Path(source) / INDEX):
        if path.is_file():
            shutil.copyfile(path, Path(target) / path.name)


def check_target(target: Path) -> None:
    """Raise CheckpointError if something that slime did not export is at the place of an export."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise CheckpointError(f"--save-hf {target} is there already and is no directory; name another")
    if target.is_dir() and any(target.iterdir()) and not (target / _MARK).is_file():
        raise CheckpointError(f"--save-hf {target} is there already, and slime did not export it; name a new directory")


def export_hf(commit: Path, target: Path) -> None:
    """Copy the commit's model, configuration and tokenizer to `target`, replacing an earlier export.

    Files that others have put into the earlier export are kept next to it.

    Raises:
        CheckpointError: Something that slime did not export is there, or the file system refused; the commit is intact.
    """
    check_target(target)
    partial, replaced = (target.with_name(f".{word}-{target.name}") for word in ("partial", "replaced"))
    try:
        _remove(replaced, target)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        copy_model(commit, partial)
        names = sorted(os.listdir(partial))
        (partial / _MARK).write_text(json.dumps({"files": names}) + "\n", encoding="utf-8")
        if target.exists():
            os.rename(target, replaced)
        os.rename(partial, target)
        _remove(replaced, target)
    except OSError as error:
        raise CheckpointError(f"--save-hf {target}: {error}; the checkpoint {commit} is intact") from error


def _remove(replaced: Path, target: Path) -> None:
    """Delete an earlier export, also one that a killed run had moved aside."""
    if replaced.exists():
        mark = replaced / _MARK
        ours = {_MARK, *(json.loads(mark.read_text(encoding="utf-8"))["files"] if mark.is_file() else ())}
        remove_made(replaced, ours.__contains__, target.with_name(f"{target.name}-kept"))
