"""The places where a user's function may reach into Megatron, with THUDM/slime's signatures.

Made by `trainer.py` when it starts, so that a wrong name or signature ends the run before a model is built. What a
reader would get wrong: every rank calls them, and calls into Megatron made inside are on the trainer's device
(`on_device`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.protocols import Args

_KINDS = {
    "custom_model_provider_path": "megatron_model_providers",
    "custom_megatron_init_path": "megatron_inits",
    "custom_megatron_before_log_prob_hook_path": "megatron_before_log_probs",
    "custom_megatron_before_train_step_hook_path": "megatron_before_train_steps",
}

HOOK_SETTINGS = tuple(_KINDS)
"""Settings that name such a function."""

STORE_PREFIXES = {"actor": "", "ref": "ref_", "teacher": "teacher_", "old_actor": "old_actor_"}
"""Role of a pass -> what the second hook is told; THUDM/slime's prefixes of the columns that the pass fills."""


@dataclass(frozen=True)
class Hooks:
    """Functions that the run names; None where it names none."""

    model_provider: Callable[..., Any] | None = None
    """`--custom-model-provider-path`: (pre_process, post_process[, vp_stage]) -> the model of a pipeline stage."""
    init: Callable[..., Any] | None = None
    """`--custom-megatron-init-path`: (args), once Megatron's process groups are there, before the model is built."""
    before_log_prob: Callable[..., Any] | None = None
    """`--custom-megatron-before-log-prob-hook-path`: (args, model, store_prefix), before each pass without gradient."""
    before_train_step: Callable[..., Any] | None = None
    """`--custom-megatron-before-train-step-hook-path`: (args, rollout_id, step_id, model, optimizer,
    opt_param_scheduler), once gradients are cleared."""

    @classmethod
    def from_args(cls, args: Args) -> Hooks:
        """Resolve the functions, by registered name, dotted path or file.

        Raises:
            PluginError: One cannot be found or has another signature.
        """
        return cls(*(_function(args, setting) for setting in _KINDS))

    def started(self, args: Args) -> None:
        """Process groups are there."""
        if self.init is not None:
            self.init(args)

    def log_probs(self, args: Args, model: Sequence[Any], role: str) -> None:
        """A pass of `role` begins; `model` are its chunks with the role's weights in them."""
        if self.before_log_prob is not None:
            self.before_log_prob(args, model, STORE_PREFIXES.get(role, f"{role}_"))

    def train_step(
        self, args: Args, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, scheduler: Any
    ) -> None:
        """An optimizer step begins."""
        if self.before_train_step is not None:
            self.before_train_step(args, rollout_id, step_id, model, optimizer, scheduler)


def _function(args: Args, setting: str) -> Callable[..., Any] | None:
    spec = getattr(args, setting, None)
    if not spec:
        return None
    from slime_core.plugins.boundary import guarded
    from slime_core.plugins.resolve import resolve

    flag = "--" + setting.replace("_", "-")
    return guarded(resolve(_KINDS[setting], spec, origin=flag).obj, flag)
