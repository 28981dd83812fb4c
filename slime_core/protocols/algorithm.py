"""RL algorithms: `AdvantageEstimator`, and the data that goes in and out of its three methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from slime_core.protocols.functions import Args

if TYPE_CHECKING:
    import torch


@dataclass
class RewardInputs:
    """The trainable samples of a whole rollout; every list has one entry per sample."""

    rewards: list[float]
    group_indices: list[int]
    """Prompt group of each sample; the key of group statistics."""
    rollout_ids: list[int]
    """Fan-out siblings share one; they are one member of their group."""
    response_lengths: list[int]
    """Trainable tokens of each response."""
    truncated: list[bool]
    """The response was cut at the token limit."""
    baselines: list[float] | None = None
    """Reward of the greedy response to the same prompt; set for estimators with `needs_greedy_baseline`."""


@dataclass
class AdvantageInputs:
    """One data-parallel rank's samples; lists have one float32 tensor of [response_length] per sample."""

    rewards: torch.Tensor
    """[n] shaped rewards."""
    response_lengths: list[int]
    group_indices: list[int]
    rollout_ids: list[int]
    loss_masks: list[torch.Tensor]
    kl: list[torch.Tensor]
    """KL estimate old-vs-reference per token; zeros without a reference."""
    log_probs: list[torch.Tensor] | None = None
    """Of the policy at the start of the update; None when the update reuses the current ones."""
    rollout_log_probs: list[torch.Tensor] | None = None
    ref_log_probs: list[torch.Tensor] | None = None
    teacher_log_probs: list[torch.Tensor] | None = None
    values: list[torch.Tensor] | None = None
    """Of the critic before the update: the expected return of the state before each response token."""


@dataclass
class Advantages:
    """Per sample [response_length] tensors."""

    advantages: list[torch.Tensor]
    returns: list[torch.Tensor]


@dataclass
class LossInputs:
    """The response tokens of one micro-batch, laid end to end: [T] tensors, T = sum(sample_lengths)."""

    log_probs: torch.Tensor
    """Of the policy being trained; carries the gradient."""
    old_log_probs: torch.Tensor
    """Of the policy at the start of the update (detached)."""
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    sample_lengths: list[int]
    returns: torch.Tensor | None = None
    rollout_log_probs: torch.Tensor | None = None
    ref_log_probs: torch.Tensor | None = None
    teacher_log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    staleness: torch.Tensor | None = None
    """Weight versions between sampling and this update; None when every token of the rollout is fresh."""


@dataclass
class LossOutputs:
    """Per-token results; the core masks and reduces them all with the same reducer."""

    loss: torch.Tensor
    """[T]"""
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """name -> [T], detached; logged as `train/<name>`."""


class AdvantageEstimator(Protocol):
    """An RL algorithm. The trainer reads the class attributes and never the name.

    Subclass `slime_core.EstimatorBase`, which supplies the defaults. Constructed as `cls(args)`.
    """

    needs_values: ClassVar[bool]
    """Brings up a critic; `AdvantageInputs.values` is set."""
    needs_teacher: ClassVar[bool]
    """`advantages` reads `AdvantageInputs.teacher_log_probs`: refused at start-up without `--use-opd`."""
    needs_log_probs: ClassVar[bool]
    """`advantages` reads `AdvantageInputs.log_probs`: they are recomputed even when one step could reuse its own."""
    ratio_level: ClassVar[Literal["token", "sequence"]]
    """"sequence": the importance ratio is one number per response (GSPO)."""
    compares_group: ClassVar[bool]
    """Rewards count relative to the group's, so that a group of one teaches nothing."""
    needs_greedy_baseline: ClassVar[bool]
    """The rollout adds one greedy response per prompt, scored and not trained on; `RewardInputs.baselines` is set."""
    requires: ClassVar[Mapping[str, Any]]
    """Settings the algorithm cannot do without, e.g. {"normalize_advantages": True}; checked at start-up."""
    defaults: ClassVar[Mapping[str, Any]]
    """Settings it brings where the user set none; checked and shown like the user's own."""
    ignores: ClassVar[Sequence[str]]
    """Settings of other estimators that its own methods leave without effect: a user who gives one is told."""

    def shape_rewards(self, args: Args, inputs: RewardInputs) -> list[float]:
        """Rewards of the whole rollout -> rewards the advantages start from (group statistics go here)."""

    def advantages(self, args: Args, inputs: AdvantageInputs) -> Advantages:
        """Shaped rewards -> per-token advantages and returns, on one data-parallel rank."""

    def policy_loss(self, args: Args, inputs: LossInputs) -> LossOutputs:
        """Per-token policy loss."""
