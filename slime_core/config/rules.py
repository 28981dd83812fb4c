"""The order in which the rules of all sections run; each stands below the settings that it is about.

An earlier rule derives what a later one reads: data comes before what divides it, the lengths of a rollout before those
of evaluation, which they are the default of.
"""

from __future__ import annotations

from slime_core.config.sections import (
    algorithm,
    cluster,
    data,
    evaluation,
    logging,
    progress,
    reward,
    rollout,
    run,
    train,
)
from slime_core.config.sections.base import Rule, run_rules
from slime_core.config.settings import Settings

RULES: tuple[Rule, ...] = (
    rollout.model_is_named,
    *run.RULES,
    *logging.RULES,
    *data.RULES,
    *progress.RULES,
    *rollout.RULES,
    *train.RULES,
    *evaluation.RULES,
    rollout.response_is_bounded,
    *reward.RULES,
    *algorithm.RULES,
    *cluster.RULES,
    progress.asynchrony,
)


def apply_rules(settings: Settings) -> None:
    """Run every rule. Raises ConfigError at the first broken one."""
    run_rules(settings, RULES)
