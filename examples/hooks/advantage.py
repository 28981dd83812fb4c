"""Advantages of your own, and a last look at the train data.

    slime train --config demo.yaml --custom-advantage-function-path examples/hooks/advantage.py \
        --rollout-data-postprocess-path examples/hooks/advantage.py

`rollout_data` is THUDM/slime's dictionary: lists with one entry per sample of this rank, tensors of [response_length]
for token-level columns. Rewards have been shaped by the estimator (GRPO's are centred in their group) before the first
function sees them.
"""

from __future__ import annotations

from typing import Any

import torch


def compute_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """The shaped reward at the last token, fading towards the first by `advantage_decay` per token (0.99)."""
    decay = getattr(args, "advantage_decay", 0.99)
    advantages = []
    for reward, length in zip(rollout_data["rewards"], rollout_data["response_lengths"]):
        distance = torch.arange(length - 1, -1, -1)
        advantages.append(float(reward) * decay**distance)
    rollout_data["advantages"] = advantages
    rollout_data["returns"] = advantages


def postprocess_rollout_data(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Negative advantages count half: a wrong answer says less about what to do than a right one."""
    rollout_data["advantages"] = [torch.where(a < 0, a / 2, a) for a in rollout_data["advantages"]]
