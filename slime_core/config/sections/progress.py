"""Settings of what waits for what: deadlines, and what runs while the trainer trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from slime_core.config.sections.base import Exclusive, Flag, NoEffect, Refused, Rule, Section, run_rules

if TYPE_CHECKING:
    from slime_core.config.settings import Settings


class ProgressArgs(Section):
    """Deadlines."""

    group_timeout: PositiveFloat | None = None
    """Seconds a prompt group may take, from when its first sample is generated to its last reward; by default only its
    samples and rewards have deadlines."""
    group_timeout_policy: Literal["retry", "substitute", "shrink", "drop", "stop"] = "substitute"
    """What becomes of a group over --group-timeout: retry regenerates it, substitute draws another prompt, shrink
    goes on with the samples that are done, drop trains on a group less, stop ends the run."""
    group_timeout_retries: PositiveInt = 2
    """Times that policy retry regenerates a group; then another prompt takes its place."""
    rollout_stall_timeout: PositiveFloat | None = None
    """Seconds without any sample ending, in a rollout or evaluation, after which the run stops; by default a minute
    more than --rollout-timeout and --rm-timeout allow a sample."""
    rollout_stop_timeout: NonNegativeFloat = 60.0
    """Seconds that groups in excess get to come back once a rollout is complete; then they are given back as they
    were drawn."""
    eval_timeout: PositiveFloat | None = None
    """Seconds an evaluation may take as a whole, after which the run stops; by default only its groups, samples and
    rewards have deadlines (--group-timeout holds for evaluated groups, too)."""
    user_code_timeout: PositiveFloat | None = 3600.0
    """Seconds that a function of yours which slime calls without a deadline of its own may take (data source, filters,
    hooks); after that the process ends with exit status 75 and a stall report."""
    train_timeout: PositiveFloat = 86400.0
    """Seconds that all optimizer steps of one rollout may take; after that the process ends with exit status 75 and a
    stall report. Collective calls have --distributed-timeout-minutes besides."""
    weight_push_timeout: PositiveFloat = 3600.0
    """Seconds that handing new weights to all engines may take as a whole; after that the process ends with exit status
    75 and a stall report. Each request of it has --update-weight-timeout besides."""
    save_timeout: PositiveFloat = 3600.0
    """Seconds that writing a checkpoint may take; after that the process ends with exit status 75 and a stall
    report."""


class AsyncArgs(Section):
    """Asynchronous training."""

    async_training: Annotated[bool, Flag(name="async")] = False
    """Generate the next rollouts while the trainer trains, as THUDM/slime's train_async.py does."""
    async_mode: Literal["one-step", "full"] = "one-step"
    """One-step generates one rollout ahead and waits for it before each weight update; full never stops generating,
    and updates weights in flight."""
    async_buffer_size: PositiveInt | None = None
    """Rollouts' worth of finished groups that may wait for the trainer: 1 is --async-mode one-step, more is full."""
    async_buffer_groups: PositiveInt | None = None
    """The same in groups, for mode full; --async-buffer-size (or 1) * --rollout-batch-size when not given."""
    max_staleness: NonNegativeInt | None = None
    """Most weight versions a sample's oldest token may be behind the weights it trains; no limit when not given."""
    staleness_policy: Literal["recycle", "drop", "mask"] = "recycle"
    """What becomes of groups over --max-staleness: recycle regenerates them, drop drops them, mask trains on their
    young tokens (loss mask 0 on the others; a sample without young tokens is removed, as a sample filter does, and
    leaves the group's statistics; a group without any is dropped)."""
    staleness_max_retries: NonNegativeInt = 3
    """Times that a group over --max-staleness is regenerated; then it is dropped."""
    eval_in_background: bool = False
    """Evaluate while training goes on; the next weight update waits until that has ended."""


RULES: tuple[Rule, ...] = (
    NoEffect(
        "group_timeout_policy group_timeout_retries", lambda a: a.group_timeout is None, "without --group-timeout"
    ),
    NoEffect(
        "group_timeout_retries",
        lambda a: a.group_timeout is not None and a.group_timeout_policy != "retry",
        "without --group-timeout-policy retry",
    ),
)


def asynchrony(s: Settings) -> None:
    """Trainer and engines work at once, so they share no device and tokens may be of older weights."""
    a = s.args
    if s.command not in ("train", "sft", "show"):
        return
    if not a.async_training:
        run_rules(s, _SYNCHRONOUS)
    elif a.debug_rollout_only:
        s.warnings.append(f"{s.cite('async_training')} has no effect with --debug-rollout-only: nothing is trained.")
    else:
        run_rules(s, _ASYNC)
        run_rules(s, _FULL if a.async_mode == "full" else _ONE_STEP)


def _mode(s: Settings) -> None:
    size = s.args.async_buffer_size
    if size is not None and size > 1 and not s.is_given("async_mode"):
        s.derive("async_mode", "full", f"async_buffer_size {size}")


def _buffer(s: Settings) -> None:
    a = s.args
    if a.async_buffer_groups is None and a.rollout_batch_size is not None:
        rollouts, shown = a.async_buffer_size or 1, "async_buffer_size * " if a.async_buffer_size else ""
        s.derive("async_buffer_groups", rollouts * a.rollout_batch_size, f"{shown}rollout_batch_size")


_SYNCHRONOUS: tuple[Rule, ...] = (
    NoEffect(
        "update_weights_interval async_mode async_buffer_size async_buffer_groups max_staleness staleness_policy"
        " staleness_max_retries eval_in_background",
        lambda a: True,
        "without --async, where every rollout begins with the newest weights",
    ),
)
_ASYNC: tuple[Rule, ...] = (
    Exclusive(
        "async_training",
        "colocate offload offload_train offload_rollout",
        "exclude each other: trainer and engines work at the same time, so neither can give up its devices or memory to"
        " the other; remove one",
    ),
    Exclusive(
        "async_training",
        "true_on_policy_mode",
        "exclude each other: one trains on tokens of older weights, the other on none",
    ),
    NoEffect("eval_in_background", lambda a: a.eval_interval is None, "without --eval-interval"),
    _mode,
    NoEffect("staleness_policy staleness_max_retries", lambda a: a.max_staleness is None, "without --max-staleness"),
)
_ONE_STEP: tuple[Rule, ...] = (  # whole rollouts, one ahead
    NoEffect(
        "async_buffer_groups staleness_max_retries",
        lambda a: True,
        "with --async-mode one-step; it is of mode full",
    ),
    Refused(
        lambda a: a.async_buffer_size is not None and a.async_buffer_size > 1,
        "{async_buffer_size}: {async_mode} has one rollout ahead; choose --async-mode full, or leave --async-mode out.",
    ),
    Refused(
        lambda a: a.max_staleness == 0,
        "{max_staleness}: --async-mode one-step trains on rollouts of the version before, so 1 is the least; without"
        " --async every rollout is of the newest weights.",
    ),
    Refused(
        lambda a: a.max_staleness is not None and a.partial_rollout and a.staleness_policy != "mask",
        "{max_staleness} and {partial_rollout} need --staleness-policy mask in --async-mode one-step: a rollout that"
        " was generated ahead has no group in the place of one that is too old. Or choose --async-mode full.",
    ),
)
_FULL: tuple[Rule, ...] = (  # groups one by one, all the time
    Refused(
        lambda a: a.load_debug_rollout_data or a.debug_train_only,
        "{async_mode}: with {debug_train_only} nothing is generated; choose one-step.",
    ),
    Refused(
        lambda a: a.rollout_function_path is not None,
        "{async_mode} generates groups itself and calls no rollout function, so {rollout_function_path} would have no"
        " effect; choose --async-mode one-step, which calls it for every rollout.",
    ),
    Exclusive("async_buffer_size", "async_buffer_groups"),
    _buffer,
)
