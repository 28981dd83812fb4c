"""`slime.rollout.sample_hooks`: call the hooks of `--rollout-sample-hook-path` from a custom rollout function.

A hook that raises makes its sample FAILED, as everywhere in slime_core. Hooks do not get failed or aborted samples.
"""

from __future__ import annotations

from typing import Any

from slime import _missing
from slime_core.sample import Sample

_current_rollout_id: int | None = None


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Set the `rollout_id` that hooks get from calls without a `rollout_id`."""
    global _current_rollout_id
    _current_rollout_id = rollout_id


async def apply_rollout_sample_hooks(args: Any, value: Any, **kwargs: Any) -> Any:
    """Apply every hook in turn and return the sample, or lists of samples in the same shape.

    Args:
        args: The run's settings, read for `rollout_sample_hook_path`.
        value: A Sample, or (nested) lists of samples.
        kwargs: `rollout_id` and `evaluation`, for hooks with these parameters.

    Raises:
        TypeError: `value` has something other than samples and lists.
        slime_core.errors.PluginError: There is no such hook.
        slime_core.errors.RolloutError: A hook returned neither a Sample nor None.
    """
    from slime.rollout._state import sample_hooks
    from slime_core.rollout.hooks import RolloutHooks

    hooks = RolloutHooks(on_sample=sample_hooks(args))
    rollout_id = kwargs.get("rollout_id", _current_rollout_id)
    evaluation = bool(kwargs.get("evaluation", False))

    async def applied(part: Any) -> Any:
        if isinstance(part, Sample):
            (shown,) = await hooks.after_generation(args, [part], rollout_id, evaluation)
            return shown
        if isinstance(part, list):
            return [await applied(inner) for inner in part]
        raise TypeError(f"apply_rollout_sample_hooks: {type(part).__name__}; expected a Sample or a list of them")

    return await applied(value) if hooks.on_sample else value


__all__ = ["apply_rollout_sample_hooks", "set_current_rollout_id"]
__getattr__ = _missing.names(__name__)
