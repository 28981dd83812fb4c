"""Check the initial weights of a run before anything starts: find the model of each setting and describe it in a line.

Called by `launch/prepare.py`. The engines read `--hf-checkpoint` too, so it must be in HF's layout. The other settings
may name a Megatron directory if the trainer reads it (`Trainer.reads_megatron`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_core.checkpoint.sources import Source, find_source, looked_for, required_source, source_in
from slime_core.checkpoint.store import is_checkpoint
from slime_core.config import Settings
from slime_core.config.foreign import find_foreign, find_owners
from slime_core.errors import CheckpointError, ConfigError
from slime_core.models.config import read_hf_config
from slime_core.protocols import TrainerTraits, traits_of

_STEPS = {"load": "ckpt_step", "ref_load": "ref_ckpt_step", "opd_teacher_load": "opd_teacher_ckpt_step"}
_USED = {"ref_load": "reference", "opd_teacher_load": "teacher", "critic_load": "critic"}


def check_starting_points(settings: Settings, trainer: Any, *, may_come: bool) -> list[str]:
    """Check every model directory that the settings name.

    Args:
        settings: Settings of the run.
        trainer: Class of the trainer; None for a run that does not train.
        may_come: A recipe has yet to create the directories, so a missing directory is not an error.

    Returns:
        One line each for reference, teacher and critic: the directory used and the model found in it.

    Raises:
        ConfigError: A directory has no model, or its format cannot be read.
        CheckpointError: A named commit is torn or missing.
    """
    args = settings.args
    _check_steps(settings)
    if args.hf_checkpoint and not may_come:
        _check_hf(settings)
    told = []
    for name, role in _USED.items():
        path, step = getattr(args, name), getattr(args, _STEPS.get(name, ""), None)
        if not path or path == args.hf_checkpoint or (may_come and find_source(path) is None):
            continue
        try:
            source = required_source(
                path, step, cite=settings.cite(name), folder="critic" if role == "critic" else None
            )
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        _check_format(settings, name, source, trainer)
        told.append(f"{role}: weights of {source.directory}, {source}")
    if args.initial_megatron_checkpoint and not may_come:
        cited = settings.cite("initial_megatron_checkpoint")
        try:
            _check_format(
                settings, "initial_megatron_checkpoint",
                required_source(args.initial_megatron_checkpoint, None, cite=cited), trainer,
            )  # fmt: skip
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
    loaded = _of_load(settings)
    if loaded is not None:
        _check_format(settings, "load", loaded, trainer)
    return told


def _of_load(settings: Settings) -> Source | None:
    """Return the model that `--load` names; None for a commit, which `launch/resume.py` handles."""
    load = settings.args.load
    return None if not load or is_checkpoint(load) else source_in(Path(load))


def _check_steps(settings: Settings) -> None:
    for name, step in _STEPS.items():
        if getattr(settings.args, step) is not None and not settings.is_given(name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{settings.cite(step)} chooses a commit of {flag}, which is not given.")


def _check_hf(settings: Settings) -> None:
    path = str(settings.args.hf_checkpoint)
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{settings.cite('hf_checkpoint')}: no HF-layout model there (no config.json)")
    source = find_source(path)
    if source is not None and not source.has_hf:
        raise ConfigError(
            f"{settings.cite('hf_checkpoint')}: its weights are in Megatron's format, which engines cannot read; name"
            " the HF model, or type slime convert megatron-to-hf"
        )


def _check_format(settings: Settings, name: str, source: Source, trainer: Any) -> None:
    if not source.has_hf and not traits_of(trainer, TrainerTraits).reads_megatron:
        raise ConfigError(
            f"{settings.cite(name)}: is {source}, which {settings.cite('train_backend')} does not read; type slime"
            " convert megatron-to-hf, or --train-backend megatron"
        )


def no_checkpoint(path: str) -> str:
    """Return the message that `--load` names no checkpoint."""
    return f"--load {path}: no slime checkpoint there. {looked_for(path)}"


def check_named_model(settings: Settings) -> None:
    """Compare the checkpoint, if it has a `config.json`, with the model that `--model` names.

    Numbers that the user gave as Megatron flags are skipped, because the trainer compares them.

    Raises:
        ConfigError: The checkpoint is a different model; the message lists every number that differs.
    """
    args = settings.args
    if args.model is None or not (Path(str(args.hf_checkpoint)) / "config.json").is_file():
        return
    from slime_core.config.named_models import named_model

    model = named_model(str(args.model), str(settings.origins.get("model", "")), settings.argv)
    hf = read_hf_config(str(args.hf_checkpoint))
    both = f"{settings.cite('model')} is not the model of {settings.cite('hf_checkpoint')}"
    if hf["model_type"] != model.model_type:
        raise ConfigError(f"{both}: {model.name} is of family {model.model_type}, config.json says {hf['model_type']}")
    different = [text for flag, text in model.contradictions(hf) if not _is_given(settings, flag)]
    if different:
        lines = "\n".join(different)
        raise ConfigError(f"{both}:\n{lines}\nRemove --model, or name the checkpoint's own; `slime models list`.")


def _is_given(settings: Settings, flag: str) -> bool:
    """Return whether the user gave the flag, under any name of its value."""
    name = flag.replace("-", "_")
    owner = find_foreign(find_owners([], {})[0], name)
    origin = settings.origins.get(owner.parser({}).by_name[name].dest) if owner is not None else None
    return origin is not None and origin.kind in ("file", "env", "flag")
