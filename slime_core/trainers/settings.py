"""`args` -> the settings that every trainer of slime's own has, checked.

Base of `embedded.settings.TrainerSettings` and `megatron.settings.MegatronSettings`. Device and dtype are resolved here
because "auto" depends on both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from slime_core.checkpoint.sources import directory_of
from slime_core.errors import ConfigError
from slime_core.protocols import Args

if TYPE_CHECKING:
    from slime_core.models.lora import LoraSettings

Role = Literal["actor", "critic"]

_SAME = ("device", "log_probs_chunk_size", "reset_optimizer_states", "distributed_backend", "finetune")
"""Fields that are settings of the same name."""
_UNLESS = ("save_optim", "save_rng", "load_optim", "load_rng")
"""Fields that a setting `no_...` turns off."""
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


def common_values(args: Args, role: Role) -> dict[str, Any]:
    """The fields of `CommonSettings` for the actor's trainer or the critic's, of which all parameters are trained.

    Args:
        args: The run's settings.
        role: Whose trainer it is.

    Raises:
        ConfigError: A value that no such trainer can honour.
    """
    actor = role == "actor"
    uses_kl = args.kl_coef or args.use_kl_loss
    has_teacher = args.use_opd and args.opd_teacher_load
    return {
        "hf_checkpoint": (
            args.hf_checkpoint if actor or args.critic_load is None else directory_of(args.critic_load, folder="critic")
        ),
        "ref_checkpoint": _checkpoint(args, args.ref_load, args.ref_ckpt_step) if uses_kl and actor else None,
        "teacher_checkpoint": (
            _checkpoint(args, args.opd_teacher_load, args.opd_teacher_ckpt_step) if has_teacher and actor else None
        ),
        "keeps_old_actor": args.keep_old_actor and actor,
        "dtype": "bfloat16" if args.dtype == "auto" and args.bf16 else args.dtype,
        "save_dtype": DTYPES[args.save_dtype],
        "save_shard_bytes": int(args.save_shard_size * 1e9),
        "temperature": args.rollout_temperature,
        "only_train": _patterns("--only-train-params-name-list", args.only_train_params_name_list) if actor else (),
        "freeze": _patterns("--freeze-params-name-list", args.freeze_params_name_list) if actor else (),
        "lora": _lora(args) if actor else None,
        "timeout_minutes": float(args.distributed_timeout_minutes),
        **{name: getattr(args, name) for name in _SAME},
        **{name: not getattr(args, f"no_{name}") for name in _UNLESS},
        "override_schedule": args.override_opt_param_scheduler,
    }


def _checkpoint(args: Args, path: str | None, step: int | None) -> str:
    """The directory with the model that a setting means; `--hf-checkpoint` where it is not given."""
    return args.hf_checkpoint if path is None else directory_of(path, step)


def _patterns(flag: str, patterns: Sequence[str] | None) -> tuple[str, ...]:
    for pattern in patterns or ():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{flag} {pattern!r}: not a regular expression: {error}") from error
    return tuple(patterns or ())


def _lora(args: Args) -> LoraSettings | None:
    if args.lora_rank is None:
        return None
    from slime_core.models.lora import LoraSettings

    return LoraSettings.from_args(args)
