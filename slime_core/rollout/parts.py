"""The parts of a rollout stage (`RolloutParts`) and its result (`RolloutResult`).

`launch.prepare` fills in the parts; `rollout.stage` uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_core.protocols import RolloutEngine
from slime_core.rollout.filters import FilterStage
from slime_core.rollout.generate import Generator, Timeline
from slime_core.rollout.hooks import RolloutHooks
from slime_core.rollout.reward import RewardStage
from slime_core.types import TrainBatch

if TYPE_CHECKING:
    from slime_core.rollout.eval_record import EvalRecord


@dataclass
class RolloutResult:
    """The batch and the metrics of one rollout, ready for the trainer."""

    batch: TrainBatch
    metrics: dict[str, float]


@dataclass
class RolloutParts:
    """The resolved components of a rollout stage."""

    data_source: Any
    rollout_function: Callable[..., Any]
    eval_function: Callable[..., Any] | None
    """Evaluation function; None for training on saved samples, where evaluation is impossible."""
    tokenizer: Any = None
    engine: RolloutEngine | None = None
    """Rollout engine; None if the rollout function needs no engine (SFT)."""
    generator: Generator | None = None
    rewards: RewardStage | None = None
    filters: FilterStage | None = None
    resolve_generator: Callable[[str], Generator] | None = None
    estimator: Any = None
    """Estimator that shapes the rewards; None leaves them unchanged."""
    post_process_rewards: Callable[..., Any] | None = None
    convert_samples: Callable[..., Any] | None = None
    needs_address: bool = False
    """True if user code may post to `args.sglang_router_ip` and `args.sglang_router_port`; the engine serves there."""
    hooks: Any = None
    """Hook relay of pluggy, or None."""
    timeline: Timeline | None = None
    """Timeline that records when samples began and ended."""
    eval_record: EvalRecord | None = None
    """Record of the finished groups of a resumable evaluation."""
    user: RolloutHooks = field(default_factory=RolloutHooks)
    """Hooks around a rollout."""
