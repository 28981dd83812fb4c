"""The data that the hook `slime_rollout_trained` passes, and the quantities that the checks compute from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from slime_core import Args
from slime_core.ops import segment_sums
from slime_core.sample import NOT_SAMPLED, TrainBatch


@dataclass(frozen=True)
class Trained:
    """A rollout and the steps taken on it."""

    args: Args
    trainer: Any
    batch: TrainBatch
    """All samples of the rollout."""
    local: TrainBatch
    """Samples of this process."""
    indices: Sequence[int]
    """Positions of the `local` samples in the batch."""
    tensors: Any
    """`learning.tensors.TrainTensors` of `local`."""
    steps: list[Any]
    """Optimizer steps of the actor."""
    known: Mapping[int, torch.Tensor]
    """Position in `local` -> the trainer's log-probs before the update, [response_length]."""

    @property
    def plain(self) -> bool:
        """Whether the first step's policy is its own old policy, and its loss is the estimator's alone."""
        args = self.args
        return not (
            args.use_rollout_logprobs
            or args.keep_old_actor
            or args.use_tis
            or args.use_opsm
            or args.proximal_policy == "interpolate"
            or args.loss_type != "policy_loss"
            or args.custom_pg_loss_reducer_function_path
        )

    @property
    def withholds(self) -> bool:
        """Whether settings withhold some sampled tokens from training."""
        return bool(self.args.mask_offpolicy_in_partial_rollout) or self.args.staleness_policy == "mask"

    @cached_property
    def groups(self) -> dict[int, list[int]]:
        """Group -> positions in the batch of its trained samples."""
        found: dict[int, list[int]] = defaultdict(list)
        for position, group in enumerate(self.batch.group_indices):
            if any(self.batch.loss_masks[position]):
                found[group].append(position)
        return found

    def sampled(self, position: int) -> list[bool]:
        """Return [response_length] whether the policy sampled each token of a sample of the batch."""
        versions = self.batch.token_weight_versions
        if versions is None:
            return [True] * self.batch.response_lengths[position]
        of = versions[position]
        return [version != NOT_SAMPLED for version in of] if NOT_SAMPLED in of else [True] * len(of)

    def fresh(self, position: int) -> bool:
        """Return whether the current weights sampled all sampled tokens of a local sample."""
        versions = self.local.token_weight_versions
        return versions is None or set(versions[position]) <= {NOT_SAMPLED, self.local.weight_version}

    @cached_property
    def mask(self) -> torch.Tensor:
        """Loss masks of the local samples, [T]."""
        return torch.cat(self.tensors.loss_masks)

    @cached_property
    def advantages(self) -> torch.Tensor:
        """Advantages of the local samples, [T]."""
        return torch.cat(self.tensors.advantages)

    @cached_property
    def carries(self) -> bool:
        """Whether any trained token has a nonzero advantage."""
        return bool(((self.advantages != 0) & (self.mask > 0)).any())


def sums(values: torch.Tensor, lengths: Sequence[int]) -> list[float]:
    """Return the sum over each row of `values`, which has rows of these lengths concatenated."""
    found: list[float] = segment_sums(values.double(), lengths).tolist()
    return found
