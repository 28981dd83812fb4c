"""Settings of what waits for what: deadlines, and what runs while the trainer trains."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slime_core.config.sections.base import Flag, Section


class ProgressArgs(Section):
    """Deadlines."""

    group_timeout: Annotated[float | None, Field(gt=0)] = None
    """Seconds a prompt group may take, from when its first sample is generated to its last reward; by default only its
    samples and rewards have deadlines."""
    group_timeout_policy: Literal["retry", "substitute", "shrink", "drop", "stop"] = "substitute"
    """What becomes of a group over --group-timeout: retry regenerates it, substitute draws another prompt, shrink
    goes on with the samples that are done, drop trains on a group less, stop ends the run."""
    group_timeout_retries: Annotated[int, Field(gt=0)] = 2
    """Times that policy retry regenerates a group; then another prompt takes its place."""
    rollout_stall_timeout: Annotated[float | None, Field(gt=0)] = None
    """Seconds without any sample ending, in a rollout or evaluation, after which the run stops; by default a minute
    more than --rollout-timeout and --rm-timeout allow a sample."""
    rollout_stop_timeout: Annotated[float, Field(ge=0)] = 60.0
    """Seconds that groups in excess get to come back once a rollout is complete; then they are given back as they
    were drawn."""
    eval_timeout: Annotated[float | None, Field(gt=0)] = None
    """Seconds an evaluation may take as a whole, after which the run stops; by default only its groups, samples and
    rewards have deadlines (--group-timeout holds for evaluated groups, too)."""
    user_code_timeout: Annotated[float | None, Field(gt=0)] = 3600.0
    """Seconds that a function of yours which slime calls without a deadline of its own may take (data source, filters,
    hooks); after that the process ends with exit status 75 and a stall report."""
    train_timeout: Annotated[float, Field(gt=0)] = 86400.0
    """Seconds that all optimizer steps of one rollout may take; after that the process ends with exit status 75 and a
    stall report. Collective calls have --distributed-timeout-minutes besides."""
    weight_push_timeout: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds that handing new weights to all engines may take as a whole; after that the process ends with exit status
    75 and a stall report. Each request of it has --update-weight-timeout besides."""
    save_timeout: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds that writing a checkpoint may take; after that the process ends with exit status 75 and a stall
    report."""


class AsyncArgs(Section):
    """Asynchronous training."""

    async_training: Annotated[bool, Flag(name="async")] = False
    """Generate the next rollouts while the trainer trains, as THUDM/slime's train_async.py does."""
    async_mode: Literal["one-step", "full"] = "one-step"
    """One-step generates one rollout ahead and waits for it before each weight update; full never stops generating,
    and updates weights in flight."""
    async_buffer_size: Annotated[int | None, Field(gt=0)] = None
    """Rollouts' worth of finished groups that may wait for the trainer: 1 is --async-mode one-step, more is full."""
    async_buffer_groups: Annotated[int | None, Field(gt=0)] = None
    """The same in groups, for mode full; --async-buffer-size (or 1) * --rollout-batch-size when not given."""
    max_staleness: Annotated[int | None, Field(ge=0)] = None
    """Most weight versions a sample's oldest token may be behind the weights it trains; no limit when not given."""
    staleness_policy: Literal["recycle", "drop", "mask"] = "recycle"
    """What becomes of groups over --max-staleness: recycle regenerates them, drop drops them, mask trains on their
    young tokens (loss mask 0 on the others; a sample without young tokens is removed, as a sample filter does, and
    leaves the group's statistics; a group without any is dropped)."""
    staleness_max_retries: Annotated[int, Field(ge=0)] = 3
    """Times that a group over --max-staleness is regenerated; then it is dropped."""
    eval_in_background: bool = False
    """Evaluate while training goes on; the next weight update waits until that has ended."""
