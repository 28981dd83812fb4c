"""Find the model in a directory given by `--load`, `--ref-load`, `--opd-teacher-load` or `--critic-load`.

    a commit               of a run (`store.py`): HF layout and the trainer's own files
    a run directory        or its `checkpoints/`: the newest commit, or the commit of one rollout (`--ckpt-step`)
    an HF directory        config.json and safetensors
    a Megatron directory   config.json and megatron.json, written by `slime convert hf-to-megatron`

The launcher checks the directories before anything starts and ends the run if it finds no model. Trainers call the same
functions to learn which files to read. This module compares only the sizes of a commit's files, because reading a large
commit on every rank takes minutes. `store.verify` checks the contents of the commit that a run resumes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime_core.checkpoint.store import CheckpointStore, is_checkpoint, read_manifest, read_state
from slime_core.errors import CheckpointError, rollout_name

MEGATRON = "megatron.json"
"""File that marks a Megatron directory; `describe_megatron` returns its contents."""
MODEL = "model"
"""Folder with the weights, in a Megatron directory and in a commit's `trainer/`."""
TRAINER = "trainer"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_OF_MEGATRON_LM = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Source:
    """A directory with a model."""

    directory: Path
    """Directory with config.json and the tokenizer's files."""
    has_hf: bool
    """True if the directory has weights in HF's layout."""
    megatron: Path | None
    """Folder with weights in the format of megatron.core.dist_checkpointing; None without."""
    rollout_id: int | None = None
    """Last rollout that a commit was trained on; None if the directory is not a commit."""

    def __str__(self) -> str:
        both = {(True, True): "HF and Megatron", (True, False): "HF", (False, True): "Megatron"}
        format_ = both[self.has_hf, self.megatron is not None]
        if self.rollout_id is not None:
            return f"a slime commit after {rollout_name(self.rollout_id)} ({format_} format)"
        return f"a model in {format_} format"


def find_source(path: str | Path, step: int | None = None, *, folder: str | None = None) -> Source | None:
    """Return the model in a directory, or None if the directory holds no model of the kinds listed above.

    Args:
        path: Path that the user gave.
        step: Rollout number that picks a commit of a run directory. None picks the newest commit.
        folder: Folder of a commit with a model of its own, such as "critic"; ignored if the commit lacks it.

    Raises:
        CheckpointError: A commit is torn, or no commit has this number.
    """
    path = Path(path)
    found = source_in(path)
    if step is not None and found is not None:
        raise CheckpointError(f"{path}: is {found}, not a run directory with commits to choose step {step} from")
    if found is None:
        commit = commit_of(path, step)
        found = None if commit is None else source_in(commit)
    if found is not None and folder is not None and found.rollout_id is not None:
        part = source_in(found.directory / folder)
        found = found if part is None else Source(part.directory, part.has_hf, part.megatron, found.rollout_id)
    return found


def required_source(path: str | Path, step: int | None = None, *, cite: str, folder: str | None = None) -> Source:
    """Return the model in a directory as `find_source` does. Error messages begin with `cite`, the setting's name.

    Raises:
        CheckpointError: The directory holds no model; the message lists the expected files.
    """
    try:
        found = find_source(path, step, folder=folder)
    except CheckpointError as error:
        raise CheckpointError(f"{cite}: {error}") from error
    if found is None:
        raise CheckpointError(f"{cite}: no model there. {looked_for(path)}")
    return found


def looked_for(path: str | Path) -> str:
    """Return the part of an error message that lists the files that identify a model directory."""
    text = (
        "Looked for an HF model (config.json with model.safetensors or model.safetensors.index.json), a directory of"
        f" `slime convert hf-to-megatron` ({MEGATRON}), and commits of a run (rollout_<number>/manifest.json, here or"
        " in checkpoints/)"
    )
    if (Path(path) / _OF_MEGATRON_LM).is_file():
        text += f". It is a checkpoint of Megatron-LM ({_OF_MEGATRON_LM}): use the HF model that it was made from"
    return text


def commit_of(path: Path, step: int | None) -> Path | None:
    """Return the commit of a run directory for a step, after comparing file sizes; None if there are no commits.

    Raises:
        CheckpointError: The commit is torn, or no commit has this number.
    """
    for root in (path, path / "checkpoints"):
        if commits := CheckpointStore(root).commits():
            return _sized(commits[-1] if step is None else CheckpointStore(root).at(step))
    if step is not None and path.is_dir():
        raise CheckpointError(f"{path}: no commits there to choose step {step} from")
    return None


def source_in(directory: Path) -> Source | None:
    """Return the model in the directory itself, or None without one. Raises CheckpointError for a torn commit."""
    rollout_id = int(read_state(_sized(directory))["rollout_id"]) if is_checkpoint(directory) else None
    if not (directory / "config.json").is_file():
        return None
    has_hf = any((directory / name).is_file() for name in _WEIGHTS)
    folder = directory / MODEL if (directory / MEGATRON).is_file() else directory / TRAINER / MODEL
    megatron = folder if (folder / "metadata.json").is_file() else None
    if not (has_hf or megatron):
        return None
    return Source(directory, has_hf, megatron, rollout_id)


def _sized(commit: Path) -> Path:
    """Return the commit. Raises CheckpointError if a file is missing or has another size."""
    for name, described in read_manifest(commit)["files"].items():
        file = commit / name
        if not file.is_file() or file.stat().st_size != described["size"]:
            raise CheckpointError(f"{commit}: torn: {name} is missing or not as large as it was saved")
    return commit
