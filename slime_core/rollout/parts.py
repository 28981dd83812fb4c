"""What a rollout stage is made of, and what it makes.

`launch.rollout_factory` fills in the parts; `rollout.stage` uses them.
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
    """One rollout, ready for the trainer."""

    batch: TrainBatch
    metrics: dict[str, float]


@dataclass
class RolloutParts:
    """The resolved components a rollout stage is made of."""

    data_source: Any
    rollout_function: Callable[..., Any]
    eval_function: Callable[..., Any] | None
    """None where nothing can be evaluated: training on saved samples."""
    tokenizer: Any = None
    engine: RolloutEngine | None = None
    """None where the rollout function needs none (SFT)."""
    generator: Generator | None = None
    rewards: RewardStage | None = None
    filters: FilterStage | None = None
    resolve_generator: Callable[[str], Generator] | None = None
    estimator: Any = None
    """Shapes the rewards; None leaves them as they are."""
    post_process_rewards: Callable[..., Any] | None = None
    convert_samples: Callable[..., Any] | None = None
    needs_address: bool = False
    """User code may post to `args.sglang_router_ip` and `args.sglang_router_port`, so they must lead to the engine."""
    hooks: Any = None
    """pluggy's hook relay, or None."""
    timeline: Timeline | None = None
    """Where to write when samples began and ended."""
    eval_record: EvalRecord | None = None
    """Where an evaluation that can be resumed keeps its finished groups."""
    user: RolloutHooks = field(default_factory=RolloutHooks)
    """The hooks around a rollout."""
