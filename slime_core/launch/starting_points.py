"""Where the weights of a run begin: what each setting names, looked at before anything starts, and one line for each.

Called by `launch/prepare.py`. The engines read `--hf-checkpoint` too, so it is in HF's layout always; the other
settings may name Megatron's, for a trainer that reads it (`Trainer.reads_megatron`).
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
    """Look at every directory with a model that the settings name.

    Args:
        settings: The run's.
        trainer: Its class; None for a run that does not train.
        may_come: A recipe has yet to make them, so that one that is missing is no mistake.

    Returns:
        What was found for reference, teacher and critic, and what of it is taken.

    Raises:
        ConfigError: There is no model, or not in a format that can be read.
        CheckpointError: A commit that is named is torn, or not there.
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
    """A model that `--load` names; not a commit, which `launch/resume.py` looks at."""
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
    """Why `--load` cannot be followed."""
    return f"--load {path}: no slime checkpoint there. {looked_for(path)}"


def check_named_model(settings: Settings) -> None:
    """Compare the checkpoint, where its `config.json` is there, with the model that `--model` names.

    A number that the user gave as a Megatron flag is that flag's: the trainer compares it.

    Raises:
        ConfigError: The checkpoint is another model; every number that differs is listed.
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
    """Whether the user gave the flag, under whatever name its value is kept."""
    name = flag.replace("-", "_")
    owner = find_foreign(find_owners([], {})[0], name)
    origin = settings.origins.get(owner.parser({}).by_name[name].dest) if owner is not None else None
    return origin is not None and origin.kind in ("file", "env", "flag")
