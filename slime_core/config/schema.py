"""Every setting of slime as one flat, typed object: `Args`.

Sections (modules under `sections`) are inherited, so `args.rollout_batch_size` needs no path. Names, types and
defaults are THUDM/slime's; a default that differs says so here:

- `update_weight_transport` is "auto" (THUDM/slime: "nccl", which colocated runs turn into tensor handles);
- `distributed_backend` is "auto" (nccl on CUDA, gloo on CPU);
- `input_key` is None, for which the data's own columns answer (THUDM/slime: "input");
- `rollout_function_path`, `data_source_path` are None, which means the built-in stage;
- `use_tensorboard` is None, which means where tensorboard is installed;
- `train_backend`, `rollout_engine` are "auto" (`config/backends.py`), where THUDM/slime has Megatron and SGLang only.

`Args` alone checks single values. Files, environment, flags and rules between values are `settings.load_settings`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field, PrivateAttr

from slime_core.config.sections.algorithm import AlgorithmArgs
from slime_core.config.sections.base import Section
from slime_core.config.sections.cluster import ClusterArgs
from slime_core.config.sections.data import DataArgs
from slime_core.config.sections.environment import EnvironmentArgs, SandboxArgs, ToolArgs
from slime_core.config.sections.evaluation import EvalArgs, EvalDataset
from slime_core.config.sections.logging import DebugArgs, LoggingArgs
from slime_core.config.sections.progress import AsyncArgs, ProgressArgs
from slime_core.config.sections.reward import RewardArgs
from slime_core.config.sections.rollout import EngineArgs, ModelArgs, RolloutArgs
from slime_core.config.sections.run import RunArgs
from slime_core.config.sections.train import CheckpointArgs, LoraArgs, OptimizerArgs, TrainArgs, WeightArgs


class Given(
    RunArgs,
    ModelArgs,
    DataArgs,
    RolloutArgs,
    EngineArgs,
    RewardArgs,
    EnvironmentArgs,
    ToolArgs,
    SandboxArgs,
    ProgressArgs,
    AlgorithmArgs,
    OptimizerArgs,
    LoraArgs,
    TrainArgs,
    WeightArgs,
    AsyncArgs,
    CheckpointArgs,
    EvalArgs,
    LoggingArgs,
    DebugArgs,
    ClusterArgs,
):
    """One attribute per flag: what somebody gave, or the default; None is what the rules have yet to fill in."""

    eval_datasets: list[EvalDataset] = Field(default_factory=list)
    """Resolved from --eval-prompt-data or --eval-config; no flag of its own."""


SECTIONS: tuple[type[Section], ...] = Given.__bases__
"""In the order of the help text."""


@dataclass(frozen=True)
class Defaults:
    """What owners say of attributes that nobody gave; goes along with `args` into other processes."""

    owners: tuple[Callable[[Any, str], Any], ...] = ()
    """Their `default_of`."""

    def __call__(self, args: Args, name: str) -> Any:
        """The first answer. Raises LookupError when nobody has one."""
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
    """Host and port that answer for each model while an engine serves them; no flag of its own."""
    _defaults: Defaults = PrivateAttr(default_factory=Defaults)
    """Asked for `args.NAME` of another program's flag that nobody gave; what was given is in `model_extra`."""

    def answer_for_absent(self, defaults: Defaults) -> None:
        """Have attributes that nobody set answered by other programs' own defaults."""
        self._defaults = defaults

    if TYPE_CHECKING:  # required, or filled in before a run begins: who may come earlier reads them as `Given`
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
