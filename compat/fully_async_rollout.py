"""`fully_async_rollout.generate_rollout_fully_async`: the name that THUDM/slime's examples have."""

from slime.rollout.fully_async_rollout import AsyncRolloutWorker, generate_rollout_fully_async

__all__ = ["AsyncRolloutWorker", "generate_rollout_fully_async"]
