"""Settings of scoring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from slime_core.config.sections.base import Components, Flag, Rule, Section
from slime_core.errors import ConfigError

if TYPE_CHECKING:
    from slime_core.config.settings import Settings


class RewardArgs(Section):
    """Reward."""

    rm_type: Annotated[str | None, Flag(holds="spec")] = None
    """Reward, by plugin name."""
    custom_rm_path: str | None = None
    """Reward: a plugin name or path to fn(args, sample) or fn(args, samples); wins over --rm-type."""
    shadow_rm_path: Components = []
    """Rewards that score copies of the samples, beside the run's and without effect on it; as --custom-rm-path."""
    reward_key: str | None = None
    """Which entry of a reward mapping trains."""
    eval_reward_key: str | None = None
    """Which entry of a reward mapping evaluates; --reward-key when not given."""
    group_rm: bool = False
    """Score a whole group with one call of a reward that takes a list of samples."""
    rm_url: str | None = None
    """Address of a remote reward model."""
    rm_timeout: PositiveFloat | None = 300.0
    """Seconds one call of the reward may run; then the sample has failed."""
    rm_workers: Annotated[int | None, Field(ge=0, le=1024)] = None
    """Processes that plain rewards run in, killed when a call overruns; 0 runs them on threads. Default: 4, or as many
    as there are cores."""
    rm_concurrency: PositiveInt = 256
    """Simultaneous calls of one async reward."""
    rm_memory_limit: PositiveFloat | None = None
    """GiB of address space of each reward process."""
    custom_reward_post_process_path: str | None = None
    """fn(args, samples) that returns (raw_rewards, rewards); the estimator's group statistics when not given."""


def _reward_is_named(s: Settings) -> None:
    """Something must score, unless the user's own generation does."""
    a = s.args
    if a.rm_type and a.custom_rm_path and s.origins["rm_type"].kind == s.origins["custom_rm_path"].kind:
        s.warnings.append(f"{s.cite('rm_type')} has no effect with {s.cite('custom_rm_path')}.")
    scores_itself = a.custom_generate_function_path or a.rollout_function_path or a.eval_function_path
    needs_none = s.command not in ("train", "eval", "rollout") or scores_itself or a.debug_train_only
    if needs_none or a.rm_type or a.custom_rm_path:
        return
    if s.command == "eval" and all(d.rm_type or d.custom_rm_path for d in a.eval_datasets):
        return
    raise ConfigError("no reward: give --rm-type NAME or --custom-rm-path PATH; `slime plugins list` shows the names.")


RULES: tuple[Rule, ...] = (_reward_is_named,)
