"""Settings of scoring."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slime_core.config.sections.base import Section


class RewardArgs(Section):
    """Reward."""

    rm_type: str | None = None
    """Reward, by plugin name."""
    custom_rm_path: str | None = None
    """Reward: a plugin name or path to fn(args, sample) or fn(args, samples); wins over --rm-type."""
    reward_key: str | None = None
    """Which entry of a reward mapping trains."""
    eval_reward_key: str | None = None
    """Which entry of a reward mapping evaluates; --reward-key when not given."""
    group_rm: bool = False
    """Score a whole group with one call."""
    rm_url: str | None = None
    """Address of a remote reward model."""
    rm_timeout: Annotated[float | None, Field(gt=0)] = 300.0
    """Seconds one call of the reward may take; then the sample has failed."""
    custom_reward_post_process_path: str | None = None
    """fn(args, samples) that returns (raw_rewards, rewards); the estimator's group statistics when not given."""
