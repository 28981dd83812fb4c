"""Every setting of slime as one flat, typed object, `Args`.

Sections (modules under `sections`) are inherited, so `args.rollout_batch_size` needs no path. Names, types and
defaults are THUDM/slime's; a default that differs says so here:

- `update_weight_transport` is "auto" (THUDM/slime: "nccl", which colocated runs turn into tensor handles);
- `distributed_backend` is "auto" (nccl on CUDA, gloo on CPU);
- `input_key` defaults to None: the key is chosen from the data's own columns (THUDM/slime: "input");
- `rollout_function_path`, `data_source_path` default to None: the built-in stage;
- `use_tensorboard` defaults to None: on if tensorboard is installed;
- `train_backend`, `rollout_engine` are "auto" (`config/load.py`), where THUDM/slime has Megatron and SGLang only.

`Args` checks single values only. `load.load_settings` reads files, environment and flags, and runs the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, PrivateAttr

from slime_core.config.sections import (
    algorithm,
    cluster,
    data,
    evaluation,
    logging,
    progress,
    reward,
    rollout,
    run,
    train,
)
from slime_core.config.sections.base import Section


class Given(
    run.RunArgs,
    rollout.ModelArgs,
    data.DataArgs,
    rollout.RolloutArgs,
    rollout.EngineArgs,
    reward.RewardArgs,
    rollout.EnvironmentArgs,
    rollout.ToolArgs,
    rollout.SandboxArgs,
    progress.ProgressArgs,
    algorithm.AlgorithmArgs,
    train.OptimizerArgs,
    train.LoraArgs,
    train.TrainArgs,
    train.WeightArgs,
    progress.AsyncArgs,
    train.CheckpointArgs,
    evaluation.EvalArgs,
    logging.LoggingArgs,
    logging.DebugArgs,
    cluster.ClusterArgs,
):
    """The settings, one attribute per flag, with given values or defaults; None is filled in by the rules."""

    eval_datasets: list[evaluation.EvalDataset] = []
    """Evaluation data sets, resolved from --eval-prompt-data or --eval-config; no flag of its own."""
    role_settings: dict[str, dict[str, Any]] = {}
    """Role ("actor", "critic") -> settings of its trainer in --megatron-config-path; no flag of its own."""


SECTIONS: tuple[type[Section], ...] = Given.__bases__
"""Sections in the order of the help text."""


@dataclass(frozen=True)
class Defaults:
    """Fallbacks for unset attributes; pickled with `args` into other processes."""

    owners: tuple[Callable[[Args, str], object], ...] = ()
    """The `default_of` functions of other programs, in order."""

    def __call__(self, args: Args, name: str) -> Any:
        """Return the first owner's default. Raises LookupError if no owner has a default."""
        for default_of in self.owners:
            try:
                return default_of(args, name)
            except LookupError:
                continue
        raise LookupError(name)


class Args(Given):
    """The run's settings: one attribute per flag, plus pass-through flags and custom keys."""

    model_config = ConfigDict(defer_build=False)

    sglang_model_routers: dict[str, tuple[str, int]] | None = None
    """Model name -> (host, port) of its router, while an engine serves it; no flag of its own."""
    _defaults: Defaults = PrivateAttr(default_factory=Defaults)
    """Source of `args.NAME` for an unset flag of another program; flags that were given are in `model_extra`."""

    def answer_for_absent(self, defaults: Defaults) -> None:
        """Use other programs' own defaults for unset attributes."""
        self._defaults = defaults

    if TYPE_CHECKING:  # required, or filled in before a run begins; earlier code uses `Given`
        hf_checkpoint: str
        num_rollout: int
        rollout_batch_size: int
        rollout_max_response_len: int
        over_sampling_batch_size: int
        global_batch_size: int
        num_steps_per_rollout: int
    else:  # for the type checker every misspelt attribute would exist

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name.startswith("_"):
                    raise
                try:
                    return self._defaults(self, name)
                except LookupError:
                    pass
                raise
