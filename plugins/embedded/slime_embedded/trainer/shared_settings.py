"""Settings common to slime's own trainers, read from `args` and checked.

Base of `embedded.settings.TrainerSettings` and `megatron.settings.MegatronSettings`. Device and dtype are resolved here
because "auto" depends on both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from slime_core.checkpoint.sources import find_source
from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_embedded.trainer.teachers import Teachers

if TYPE_CHECKING:
    from slime_embedded.models.lora import LoraSettings

Role = Literal["actor", "critic"]

_SAME = ("device", "log_probs_chunk_size", "reset_optimizer_states", "distributed_backend", "finetune")
"""Fields that are copied from the setting of the same name."""
_UNLESS = ("save_optim", "save_rng", "load_optim", "load_rng")
"""Fields that a setting `no_<field>` turns off."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class CommonSettings:
    """Settings of a trainer besides model, optimizer and schedule."""

    hf_checkpoint: str
    """Initial weights; also where config and tokenizer files are copied from on save."""
    ref_checkpoint: str | None
    """Weights of the frozen reference; None if no KL term needs a reference."""
    teachers: Teachers
    """The frozen teachers; none without `--use-opd`, or if their log-probs come with the samples."""
    keeps_old_actor: bool
    """`--keep-old-actor`: keep a copy of the actor's weights at the last `update_old_actor`."""
    device: str
    """"auto", "cpu" or "cuda"."""
    dtype: str
    """"auto", "float32" or "bfloat16"."""
    save_dtype: torch.dtype
    save_shard_bytes: int
    """Largest size of a file of HF-layout weights."""
    temperature: float
    log_probs_chunk_size: int
    """Number of rows of logits held at a time; -1 lets the trainer choose."""
    only_train: tuple[str, ...]
    freeze: tuple[str, ...]
    lora: LoraSettings | None
    """Adapters to train instead of the actor's weights; None without `--lora-rank` and for a critic."""
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
    """On load, use this run's learning-rate schedule if the checkpoint's differs."""

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """Return bfloat16 if requested, or for "auto" on a device whose matrix units benefit from it."""
        if self.dtype == "auto":
            gains = device.type == "cuda" and torch.cuda.is_bf16_supported()
            return torch.bfloat16 if gains else torch.float32
        return DTYPES[self.dtype]

    @property
    def list_flag(self) -> str:
        """Flag whose patterns select the trained parameters, if one is given."""
        return "--only-train-params-name-list" if self.only_train else "--freeze-params-name-list"

    def trained(self, parameters: Sequence[tuple[str, str]]) -> tuple[set[str], list[str]]:
        """Return the parameters that the lists leave to training.

        A pattern matches HF's names, so that a list selects the same parameters with every trainer. A pattern that
        matches no HF name is matched against the trainer's own names.

        Args:
            parameters: All trainable parameters: HF's name, and the trainer's own name ("" if it has no other).

        Returns:
            HF's names of the trained parameters, and a warning about patterns that match no name if others match.

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
    """Return HF's names of the parameters that a pattern matches."""
    found = {hf for hf, _ in parameters if re.search(pattern, hf)}
    return found or {hf for hf, own in parameters if own and re.search(pattern, own)}


def common_values(args: Args, role: Role) -> dict[str, Any]:
    """Return the fields of `CommonSettings` for the actor's trainer, or for the critic's, which trains all parameters.

    Args:
        args: The run's settings.
        role: Role of the trainer.

    Raises:
        ConfigError: A value is not supported by these trainers.
    """
    actor = role == "actor"
    uses_kl = args.kl_coef or args.use_kl_loss
    return {
        "hf_checkpoint": (
            args.hf_checkpoint if actor or args.critic_load is None else directory_of(args.critic_load, folder="critic")
        ),
        "ref_checkpoint": _checkpoint(args, args.ref_load, args.ref_ckpt_step) if uses_kl and actor else None,
        "teachers": Teachers.of(args) if actor else Teachers({}, {}),
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


def directory_of(path: str | Path, step: int | None = None, *, folder: str | None = None) -> str:
    """Return the directory of the model; return `path` itself if it holds no model, which the launcher reports."""
    found = find_source(path, step, folder=folder)
    return str(path if found is None else found.directory)


def _checkpoint(args: Args, path: str | None, step: int | None) -> str:
    """Return the directory of the model that a setting names; `--hf-checkpoint` if it is not given."""
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
    from slime_embedded.models.lora import LoraSettings

    return LoraSettings.from_args(args)
