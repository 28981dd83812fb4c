"""Settings of what may be waited for how long, and what happens then."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slime_core.config.sections.base import Section


class ProgressArgs(Section):
    """Deadlines."""

    group_timeout: Annotated[float | None, Field(gt=0)] = None
    """Seconds a prompt group may take, from when its first sample is generated to its last reward; by default only its
    samples and rewards have deadlines."""
    group_timeout_policy: Literal["retry", "substitute", "shrink", "drop", "stop"] = "substitute"
    """What becomes of a group over --group-timeout: retry generates it afresh, substitute draws another prompt, shrink
    goes on with the samples that are done, drop trains on a group less, stop ends the run."""
    group_timeout_retries: Annotated[int, Field(gt=0)] = 2
    """Times that policy retry generates a group afresh; then another prompt takes its place."""
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
