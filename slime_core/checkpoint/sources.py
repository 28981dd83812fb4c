"""What `--load`, `--ref-load`, `--opd-teacher-load` and `--critic-load` may name, and which of it is there.

    a commit           of a run (`store.py`): HF layout, and what its trainer needs beside it
    a run directory    or its `checkpoints/`: the newest commit, or that of a rollout's number (`--ckpt-step`)
    an HF directory    config.json and safetensors
    a Megatron one     config.json and megatron.json, by `slime convert hf-to-megatron`

The launcher asks before anything starts, so that a directory that is none of these ends the run; trainers ask again for
what to read. Only sizes of a commit's files are compared here, since reading all of a large one on every rank takes
minutes; `store.verify` is for the commit that a run goes on from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime_core.checkpoint.store import CheckpointStore, is_checkpoint, read_manifest, read_state
from slime_core.errors import CheckpointError

MEGATRON = "megatron.json"
"""In a Megatron directory; `describe_megatron` has what is in it."""
MODEL = "model"
"""Folder of a Megatron directory, and of `trainer/` in a commit, with the weights."""
TRAINER = "trainer"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_OF_MEGATRON_LM = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Source:
    """A directory with a model."""

    directory: Path
    """With config.json and the tokenizer's files."""
    has_hf: bool
    """Its weights are there in HF's layout."""
    megatron: Path | None
    """Folder with its weights as megatron.core.dist_checkpointing has them; None without."""
    rollout_id: int | None = None
    """Of a commit: the last rollout that it was trained on."""

    def __str__(self) -> str:
        both = {(True, True): "HF and Megatron", (True, False): "HF", (False, True): "Megatron"}
        format_ = both[self.has_hf, self.megatron is not None]
        if self.rollout_id is not None:
            return f"a slime commit after rollout {self.rollout_id} ({format_} format)"
        return f"a model in {format_} format"


def find_source(path: str | Path, step: int | None = None, *, folder: str | None = None) -> Source | None:
    """What the directory holds; None for nothing of the list above.

    Args:
        path: What the user named.
        step: Number of a rollout: that commit of a run directory. Without, the newest.
        folder: Of a commit that has it, a model of its own there: "critic".

    Raises:
        CheckpointError: A commit is torn, or there is none of that number.
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
    """As `find_source`. `cite` is the setting, for messages.

    Raises:
        CheckpointError: Nothing is there, and what was looked for.
    """
    try:
        found = find_source(path, step, folder=folder)
    except CheckpointError as error:
        raise CheckpointError(f"{cite}: {error}") from error
    if found is None:
        raise CheckpointError(f"{cite}: no model there. {looked_for(path)}")
    return found


def looked_for(path: str | Path) -> str:
    """What makes a directory one with a model."""
    text = (
        "Looked for an HF model (config.json with model.safetensors or model.safetensors.index.json), a directory of"
        f" `slime convert hf-to-megatron` ({MEGATRON}), and commits of a run (rollout_<number>/manifest.json, here or"
        " in checkpoints/)"
    )
    if (Path(path) / _OF_MEGATRON_LM).is_file():
        text += f". It is a checkpoint of Megatron-LM ({_OF_MEGATRON_LM}): use the HF model that it was made from"
    return text


def directory_of(path: str | Path, step: int | None = None, *, folder: str | None = None) -> str:
    """Of the source; the path itself where there is none, which is the launcher's to complain about."""
    found = find_source(path, step, folder=folder)
    return str(path if found is None else found.directory)


def commit_of(path: Path, step: int | None) -> Path | None:
    """The commit that a run directory's step means, by the sizes of its files; None when there are no commits.

    Raises:
        CheckpointError: It is torn, or there is none of that number.
    """
    for root in (path, path / "checkpoints"):
        if commits := CheckpointStore(root).commits():
            return _sized(commits[-1] if step is None else CheckpointStore(root).at(step))
    if step is not None and path.is_dir():
        raise CheckpointError(f"{path}: no commits there to choose step {step} from")
    return None


def source_in(directory: Path) -> Source | None:
    """The model in the directory itself; None without one."""
    if not (directory / "config.json").is_file():
        return None
    has_hf = any((directory / name).is_file() for name in _WEIGHTS)
    folder = directory / MODEL if (directory / MEGATRON).is_file() else directory / TRAINER / MODEL
    megatron = folder if (folder / "metadata.json").is_file() else None
    if not (has_hf or megatron):
        return None
    rollout_id = int(read_state(directory)["rollout_id"]) if is_checkpoint(directory) else None
    return Source(directory, has_hf, megatron, rollout_id)


def _sized(commit: Path) -> Path:
    for name, described in read_manifest(commit)["files"].items():
        file = commit / name
        if not file.is_file() or file.stat().st_size != described["size"]:
            raise CheckpointError(f"{commit}: torn: {name} is missing or not as large as it was saved")
    return commit
