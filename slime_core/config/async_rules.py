"""Rules of asynchronous training: what `--async` excludes, and what has no effect without it; and of deadlines.

`rules.RULES` runs them. Mode one-step is always one weight version behind at some point, so `--max-staleness 0` is not
strict but impossible there.
"""

from __future__ import annotations

from slime_core.config.settings import Settings
from slime_core.errors import ConfigError

_ASYNC_ONLY = (
    "async_mode",
    "async_buffer_size",
    "async_buffer_groups",
    "max_staleness",
    "staleness_policy",
    "staleness_max_retries",
    "eval_in_background",
)
_FULL_ONLY = ("async_buffer_groups", "staleness_max_retries")
_SHARE_DEVICES = ("colocate", "offload", "offload_train", "offload_rollout")


def asynchrony(s: Settings) -> None:
    """Trainer and engines work at once, so they share no device and tokens may be of older weights."""
    a = s.args
    if s.command not in ("train", "sft", "show"):
        return
    if not a.async_training:
        _synchronous(s)
        return
    if a.debug_rollout_only:
        s.warnings.append(f"{s.cite('async_training')} has no effect with --debug-rollout-only: nothing is trained.")
        return
    for name in _SHARE_DEVICES:
        if getattr(a, name):
            raise ConfigError(
                f"{s.cite('async_training')} and {s.cite(name)} exclude each other: trainer and engines work at the"
                " same time, so neither can give up its devices or memory to the other; remove one."
            )
    if a.true_on_policy_mode:
        raise ConfigError(
            f"{s.cite('async_training')} and {s.cite('true_on_policy_mode')} exclude each other: one trains on tokens"
            " of older weights, the other on none."
        )
    if a.eval_in_background and a.eval_interval is None:
        _without_effect(s, ("eval_in_background",), "without --eval-interval")
    if a.async_buffer_size is not None and a.async_buffer_size > 1 and not s.is_given("async_mode"):
        s.derive("async_mode", "full", f"async_buffer_size {a.async_buffer_size}")
    if a.max_staleness is None:
        _without_effect(s, ("staleness_policy", "staleness_max_retries"), "without --max-staleness")
    (_full if a.async_mode == "full" else _one_step)(s)


def _without_effect(s: Settings, names: tuple[str, ...], why: str) -> None:
    s.warnings += [f"{s.cite(name)} has no effect {why}." for name in names if s.is_given(name)]


def _synchronous(s: Settings) -> None:
    """Without `--async`."""
    if s.args.update_weights_interval > 1:
        raise ConfigError(
            f"{s.cite('update_weights_interval')} needs --async: without it every rollout begins with the newest"
            " weights."
        )
    _without_effect(s, _ASYNC_ONLY, "without --async")


def _one_step(s: Settings) -> None:
    """Whole rollouts, one ahead."""
    a = s.args
    _without_effect(s, _FULL_ONLY, "with --async-mode one-step; it is of mode full")
    if a.async_buffer_size is not None and a.async_buffer_size > 1:
        raise ConfigError(
            f"{s.cite('async_buffer_size')}: {s.cite('async_mode')} has one rollout ahead; choose --async-mode full, or"
            " leave --async-mode out."
        )
    if a.max_staleness == 0:
        raise ConfigError(
            f"{s.cite('max_staleness')}: --async-mode one-step trains on rollouts of the version before, so 1 is the"
            " least; without --async every rollout is of the newest weights."
        )
    if a.max_staleness is not None and a.partial_rollout and a.staleness_policy != "mask":
        raise ConfigError(
            f"{s.cite('max_staleness')} and {s.cite('partial_rollout')} need --staleness-policy mask in --async-mode"
            " one-step: a rollout that was generated ahead has no group in the place of one that is too old. Or choose"
            " --async-mode full."
        )


def _full(s: Settings) -> None:
    """Groups one by one, all the time."""
    a = s.args
    if a.load_debug_rollout_data or a.debug_train_only:
        raise ConfigError(
            f"{s.cite('async_mode')}: with {s.cite('debug_train_only')} nothing is generated; choose one-step."
        )
    if a.rollout_function_path is not None:
        raise ConfigError(
            f"{s.cite('async_mode')} generates groups itself and calls no rollout function, so"
            f" {s.cite('rollout_function_path')} would have no effect; choose --async-mode one-step, which calls it for"
            " every rollout."
        )
    if a.async_buffer_groups is not None and a.async_buffer_size is not None:
        raise ConfigError(f"{s.cite('async_buffer_size')} and {s.cite('async_buffer_groups')} are both set; use one.")
    if a.async_buffer_groups is None and a.rollout_batch_size is not None:
        rollouts, shown = a.async_buffer_size or 1, "async_buffer_size * " if a.async_buffer_size else ""
        s.derive("async_buffer_groups", rollouts * a.rollout_batch_size, f"{shown}rollout_batch_size")


def group_deadline(s: Settings) -> None:
    """A policy without `--group-timeout`, or of another policy, has no effect."""
    if s.args.group_timeout is None:
        for name in ("group_timeout_policy", "group_timeout_retries"):
            if s.is_given(name):
                s.warnings.append(f"{s.cite(name)} has no effect without --group-timeout.")
    elif s.args.group_timeout_policy != "retry" and s.is_given("group_timeout_retries"):
        s.warnings.append(f"{s.cite('group_timeout_retries')} has no effect without --group-timeout-policy retry.")
