"""Settings of asynchronous training: what runs while the trainer trains, and how old samples may be."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slime_core.config.sections.base import Flag, Section


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
    """What becomes of groups over --max-staleness: recycle generates them afresh, drop drops them, mask trains on their
    young tokens (loss mask 0 on the others; a sample without young tokens is removed, as a sample filter does, and
    leaves the group's statistics; a group without any is dropped)."""
    staleness_max_retries: Annotated[int, Field(ge=0)] = 3
    """Times that a group over --max-staleness is generated afresh; then it is dropped."""
    eval_in_background: bool = False
    """Evaluate while training goes on; the next weight update waits until that has ended."""
