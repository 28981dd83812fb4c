"""`args` -> the settings that every trainer of slime's own has, checked.

Base of `embedded.settings.TrainerSettings` and `megatron.settings.MegatronSettings`. The defaults are those of the
command line, so tests and scripts can pass an `args` that names only what they care about. Device and dtype are
resolved here because "auto" depends on both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from slime_core.checkpoint.sources import directory_of
from slime_core.errors import ConfigError
from slime_core.models.hf_io import SHARD_BYTES
from slime_core.models.lora import LoraSettings
from slime_core.protocols import Args

Role = Literal["actor", "critic"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class CommonSettings:
    """What a trainer needs to know besides model, optimizer and schedule."""

    hf_checkpoint: str
    """Initial weights; also where config and tokenizer files are copied from on save."""
    ref_checkpoint: str | None
    """Weights of the frozen reference; None when no KL term needs one."""
    teacher_checkpoint: str | None
    """The frozen teacher; None without `--use-opd`, or when its log-probs come with the samples."""
    keeps_old_actor: bool
    """`--keep-old-actor`: the actor's weights at the last `update_old_actor` are kept beside it."""
    device: str
    """"auto", "cpu" or "cuda"."""
    dtype: str
    """"auto", "float32" or "bfloat16"."""
    save_dtype: torch.dtype
    save_shard_bytes: int
    """Largest file of HF-layout weights."""
    temperature: float
    log_probs_chunk_size: int
    """Rows of logits held at a time; -1 lets the trainer choose."""
    only_train: tuple[str, ...]
    freeze: tuple[str, ...]
    lora: LoraSettings | None
    """Adapters are trained instead of the actor's weights; None without `--lora-rank` and for a critic."""
    reset_optimizer_states: bool
    timeout_minutes: float
    distributed_backend: str
    """"auto", "gloo" or "nccl"."""
    save_optim: bool
    save_rng: bool
    load_optim: bool
    load_rng: bool
    finetune: bool
    override_schedule: bool
    """On load, take this run's learning-rate schedule where the checkpoint's differs."""

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """bfloat16 when asked for, or when "auto" meets a device whose matrix units gain from it."""
        if self.dtype == "auto":
            gains = device.type == "cuda" and torch.cuda.is_bf16_supported()
            return torch.bfloat16 if gains else torch.float32
        return DTYPES[self.dtype]

    @property
    def list_flag(self) -> str:
        """The flag whose patterns say what is trained, where one is given."""
        return "--only-train-params-name-list" if self.only_train else "--freeze-params-name-list"

    def trained(self, parameters: Sequence[tuple[str, str]]) -> tuple[set[str], list[str]]:
        """What the lists leave to training.

        A pattern means HF's names, so that a list chooses the same with every trainer; one that is found in none of
        them means the trainer's own.

        Args:
            parameters: All that could be trained: HF's name, and the trainer's own ("" where it has no other).

        Returns:
            HF's names of what is trained, and a warning about patterns that are found in no name, where another is.

        Raises:
            ConfigError: Both lists are given, no pattern is found in any name, or nothing is left to train.
        """
        if self.only_train and self.freeze:
            raise ConfigError("--only-train-params-name-list and --freeze-params-name-list: give one of the two")
        known = {hf for hf, _ in parameters}
        patterns = self.only_train or self.freeze
        if not patterns:
            return known, []
        found = {pattern: _with(pattern, parameters) for pattern in patterns}
        listed = set[str]().union(*found.values())
        trained = listed if self.only_train else known - listed
        example = " or ".join(filter(None, parameters[-1]))
        if not trained:
            raise ConfigError(f"{self.list_flag}: no parameter is left to train; names look like {example}")
        idle = [pattern for pattern in patterns if not found[pattern]]
        said = f"{self.list_flag} {' '.join(idle)}: no parameter has such a name; names look like {example}"
        if len(idle) == len(patterns):
            raise ConfigError(f"{said}; correct it, or remove it to train all")
        return trained, [said] if idle else []


def _with(pattern: str, parameters: Sequence[tuple[str, str]]) -> set[str]:
    """HF's names of the parameters that a pattern means."""
    found = {hf for hf, _ in parameters if re.search(pattern, hf)}
    return found or {hf for hf, own in parameters if own and re.search(pattern, own)}


def value_of(args: Args, name: str, default: Any) -> Any:
    """A setting, or the command line's default where it is missing or None."""
    value = getattr(args, name, None)
    return default if value is None else value


def common_values(args: Args, role: Role, trainer: str) -> dict[str, Any]:
    """The fields of `CommonSettings` for the actor's trainer or the critic's, of which all parameters are trained.

    Args:
        args: The run's settings.
        role: Whose trainer it is.
        trainer: How messages call it, e.g. "the embedded trainer".

    Raises:
        ConfigError: A value that no such trainer can honour.
    """
    if value_of(args, "fp16", False):
        raise ConfigError(f"--fp16: {trainer} has no loss scaling; use --bf16 or --dtype float32")
    dtype = value_of(args, "dtype", "auto")
    if dtype == "auto" and value_of(args, "bf16", False):
        dtype = "bfloat16"
    actor = role == "actor"
    uses_kl = bool(value_of(args, "kl_coef", 0.0)) or bool(value_of(args, "use_kl_loss", False))
    has_teacher = bool(value_of(args, "use_opd", False) and value_of(args, "opd_teacher_load", None))
    save_dtype = _one_of(trainer, "--save-dtype", value_of(args, "save_dtype", "float32"), tuple(DTYPES))
    return {
        "hf_checkpoint": str(args.hf_checkpoint) if actor else _critic_checkpoint(args),
        "ref_checkpoint": _checkpoint(args, "ref_load", "ref_ckpt_step") if uses_kl and actor else None,
        "teacher_checkpoint": (
            _checkpoint(args, "opd_teacher_load", "opd_teacher_ckpt_step") if has_teacher and actor else None
        ),
        "keeps_old_actor": bool(value_of(args, "keep_old_actor", False)) and actor,
        "device": _one_of(trainer, "--device", value_of(args, "device", "auto"), ("auto", "cpu", "cuda")),
        "dtype": _one_of(trainer, "--dtype", dtype, ("auto", *DTYPES)),
        "save_dtype": DTYPES[save_dtype],
        "save_shard_bytes": int(float(value_of(args, "save_shard_size", SHARD_BYTES / 1e9)) * 1e9),
        "temperature": float(value_of(args, "rollout_temperature", 1.0)),
        "log_probs_chunk_size": int(value_of(args, "log_probs_chunk_size", -1)),
        "only_train": _patterns(args, "only_train_params_name_list") if actor else (),
        "freeze": _patterns(args, "freeze_params_name_list") if actor else (),
        "lora": LoraSettings.from_args(args) if actor else None,
        "reset_optimizer_states": bool(value_of(args, "reset_optimizer_states", False)),
        "timeout_minutes": float(value_of(args, "distributed_timeout_minutes", 10)),
        "distributed_backend": str(value_of(args, "distributed_backend", "auto")),
        "save_optim": not value_of(args, "no_save_optim", False),
        "save_rng": not value_of(args, "no_save_rng", False),
        "load_optim": not value_of(args, "no_load_optim", False),
        "load_rng": not value_of(args, "no_load_rng", False),
        "finetune": bool(value_of(args, "finetune", False)),
        "override_schedule": bool(value_of(args, "override_opt_param_scheduler", False)),
    }


def _checkpoint(args: Args, name: str, step: str) -> str:
    """The directory with the model that a setting means; `--hf-checkpoint` where it is not given."""
    path = value_of(args, name, None)
    return str(args.hf_checkpoint) if path is None else directory_of(path, value_of(args, step, None))


def _critic_checkpoint(args: Args) -> str:
    path = value_of(args, "critic_load", None)
    return str(args.hf_checkpoint) if path is None else directory_of(path, folder="critic")


def _one_of(trainer: str, flag: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{flag} {value}: {trainer} knows {', '.join(allowed)}")
    return str(value)


def _patterns(args: Args, name: str) -> tuple[str, ...]:
    values = value_of(args, name, ())
    patterns = (values,) if isinstance(values, str) else tuple(values)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {pattern!r}: not a regular expression: {error}") from error
    return patterns
