"""Every setting of slime as one flat, typed object, `Args`, and the order of the rules between them.

Sections (modules under `sections`) are inherited, so `args.rollout_batch_size` needs no path. Names, types and
defaults are THUDM/slime's; a default that differs says so here:

- `update_weight_transport` is "auto" (THUDM/slime: "nccl", which colocated runs turn into tensor handles);
- `distributed_backend` is "auto" (nccl on CUDA, gloo on CPU);
- `input_key` is None, for which the data's own columns answer (THUDM/slime: "input");
- `rollout_function_path`, `data_source_path` are None, which means the built-in stage;
- `use_tensorboard` is None, which means where tensorboard is installed;
- `train_backend`, `rollout_engine` are "auto" (`config/backends.py`), where THUDM/slime has Megatron and SGLang only.

`Args` alone checks single values. Files, environment and flags are `load.load_settings`, which runs the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field, PrivateAttr

from slime_core.config.sections import (
    algorithm,
    cluster,
    data,
    environment,
    evaluation,
    logging,
    progress,
    reward,
    rollout,
    run,
    train,
)
from slime_core.config.sections.base import Rule, Section


class Given(
    run.RunArgs,
    rollout.ModelArgs,
    data.DataArgs,
    rollout.RolloutArgs,
    rollout.EngineArgs,
    reward.RewardArgs,
    environment.EnvironmentArgs,
    environment.ToolArgs,
    environment.SandboxArgs,
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
    """One attribute per flag: what somebody gave, or the default; None is what the rules have yet to fill in."""

    eval_datasets: list[evaluation.EvalDataset] = Field(default_factory=list)
    """Resolved from --eval-prompt-data or --eval-config; no flag of its own."""


SECTIONS: tuple[type[Section], ...] = Given.__bases__
"""In the order of the help text."""

RULES: tuple[Rule, ...] = (
    rollout.model_is_named,
    *run.RULES,
    *logging.RULES,
    *data.RULES,
    *progress.RULES,
    *rollout.RULES,
    *train.RULES,
    *evaluation.RULES,
    rollout.response_is_bounded,
    *reward.RULES,
    *algorithm.RULES,
    *cluster.RULES,
    progress.asynchrony,
)
"""In the order in which they run; each stands below the settings that it is about. An earlier one derives what a later
one reads: data comes before what divides it, the lengths of a rollout before those of evaluation, which they are the
default of."""


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
