"""Hooks that this trainer calls: a plugin, or a function behind a flag, reaches into Megatron.

Every rank calls them, in its own process, where calls into Megatron are on the trainer's device. What one raises ends
the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slime_core.plugins.hookspecs import hookspec
from slime_core.plugins.kind import Call, Kind
from slime_core.protocols import Args


@hookspec
def slime_megatron_init(args: Args) -> None:
    """Megatron's process groups are there, the model is not: once per process, before the actor's is built."""


@hookspec
def slime_megatron_before_log_prob(args: Args, model: Sequence[Any], store_prefix: str) -> None:
    """A pass without gradient begins.

    `model` is a list of this rank's chunks with the role's weights in them; `store_prefix` is "" for the actor, else
    "ref_", "teacher_" or "old_actor_".
    """


@hookspec
def slime_megatron_before_train_step(
    args: Args, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """An optimizer step begins: gradients are cleared.

    `optimizer` is Megatron's; `opt_param_scheduler` has `get_lr`, `get_wd` and `num_steps`. `step_id` counts the steps
    of the rollout from 0.
    """


FLAGS = (
    Kind(
        replaces=True,
        name="megatron_model_providers",
        flags=("--custom-model-provider-path",),
        canonical=("model_provider", "custom_model_provider"),
        calls=(Call("(*, pre_process, post_process[, vp_stage]) -> GPTModel"),),
    ),
    Kind(
        name="slime_megatron_init",
        word="megatron_init",
        flags=("--custom-megatron-init-path",),
        canonical=("megatron_init", "custom_megatron_init"),
        calls=(Call("(args) -> None"),),
        trains=True,
    ),
    Kind(
        name="slime_megatron_before_log_prob",
        word="megatron_before_log_prob",
        flags=("--custom-megatron-before-log-prob-hook-path",),
        canonical=("before_log_prob", "megatron_before_log_prob"),
        calls=(Call("(args, model, store_prefix) -> None"),),
        trains=True,
    ),
    Kind(
        name="slime_megatron_before_train_step",
        word="megatron_before_train_step",
        flags=("--custom-megatron-before-train-step-hook-path",),
        canonical=("before_train_step", "megatron_before_train_step"),
        calls=(Call("(args, rollout_id, step_id, model, optimizer, opt_param_scheduler) -> None"),),
        trains=True,
    ),
)
"""Flags whose function implements one of them, with THUDM/slime's signatures, or builds the model."""


_PROVIDER = "custom_model_provider_path"

HOOK_SETTINGS = tuple(row.setting for row in FLAGS)
"""Settings that name such a function."""

STORE_PREFIXES = {"actor": "", "ref": "ref_", "teacher": "teacher_", "old_actor": "old_actor_"}
"""Role of a pass -> `store_prefix` of the hook before it: THUDM/slime's prefix of the columns that the pass fills."""


def model_provider(args: Args) -> Callable[..., Any] | None:
    """Return the function of `--custom-model-provider-path`, which builds the model of a pipeline stage.

    Its parameters are (pre_process, post_process[, vp_stage]).

    Raises:
        PluginError: The function cannot be found or has another signature.
    """
    spec = args.custom_model_provider_path
    if not spec:
        return None
    from slime_core.plugins.resolve import resolve
    from slime_core.workers.call import guarded

    flag = "--" + _PROVIDER.replace("_", "-")
    return guarded(resolve("megatron_model_providers", spec, origin=flag).obj, flag)
