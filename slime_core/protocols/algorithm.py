"""RL algorithms: `AdvantageEstimator`, and the inputs and outputs of its methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from slime_core.protocols.functions import Args

if TYPE_CHECKING:
    import torch

    from slime_core.sample.provenance import TurnSpan


@dataclass
class RewardInputs:
    """The trainable samples of a whole rollout; every list has one entry per sample."""

    rewards: list[float]
    group_indices: list[int]
    """Prompt group of each sample, of each of `--lora-adapters` apart; the key of group statistics."""
    rollout_ids: list[int]
    """Rollout id of each sample. Fan-out siblings share an id; they are one member of their group."""
    response_lengths: list[int]
    """Trainable tokens of each response."""
    truncated: list[bool]
    """Whether each response was cut at the token limit."""
    baselines: list[float] | None = None
    """Reward of the greedy response to the same prompt; set for estimators with `needs_greedy_baseline`."""
    components: list[dict[str, float]] = field(default_factory=list)
    """Parts of each reward by name (`Sample.reward_components`); {} for a sample without parts."""
    turns: list[list[TurnSpan]] = field(default_factory=list)
    """Turns of each response, in order, each with `state`; a turn's tokens may all be masked, or none."""
    metadata: list[dict[str, Any]] = field(default_factory=list)
    """`Sample.metadata` of each sample."""

    @property
    def turn_rewards(self) -> list[list[float | None]]:
        """Reward of each turn; None for a turn without one. The sample's reward may or may not be their sum."""
        return [[turn.reward for turn in row] for row in self.turns]

    @property
    def state_ids(self) -> list[list[str]]:
        """Id of the state in which each turn began; equal ids within a group are the same state.

        An environment may set them. Otherwise an id is a digest of the tokens between the turn and the turn before; for
        the first turn, of the prompt.
        """
        return [[turn.state or "" for turn in row] for row in self.turns]


@dataclass
class AdvantageInputs:
    """The samples of a data-parallel rank; tensor lists have a float32 tensor of [response_length] per sample."""

    rewards: torch.Tensor
    """[n] shaped rewards."""
    response_lengths: list[int]
    group_indices: list[int]
    rollout_ids: list[int]
    loss_masks: list[torch.Tensor]
    kl: list[torch.Tensor]
    """KL estimate old-vs-reference per token; zeros without a reference."""
    log_probs: list[torch.Tensor] | None = None
    """Log-probs of the policy at the start of the update; None when the update reuses the current ones."""
    rollout_log_probs: list[torch.Tensor] | None = None
    ref_log_probs: list[torch.Tensor] | None = None
    teacher_log_probs: list[torch.Tensor] | None = None
    values: list[torch.Tensor] | None = None
    """Values of the critic before the update: the expected return of the state before each response token."""
    components: list[dict[str, float]] = field(default_factory=list)
    """Parts of each reward by name, as in `RewardInputs`."""
    turns: list[list[TurnSpan]] = field(default_factory=list)
    """Turns of each response: `turn.first` and `turn.last` are places in the tensors above."""
    turn_rewards: list[list[float]] = field(default_factory=list)
    """Shaped reward of each turn: the result of `shape_turns`."""
    rollout_data: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the samples under THUDM/slime's names, such as `tokens`, `raw_reward`, `truncated`, `metadata`
    and `total_lengths` (`TrainBatch.to_rollout_data`)."""

    def over_turns(self, values: Sequence[Sequence[float]], outside: float = 0.0) -> list[torch.Tensor]:
        """Return per-token tensors in which each token has the value of its turn; other tokens have `outside`.

        With `[range(len(row)) for row in inputs.turns]` and -1 the result is the number of each token's turn.

        Args:
            values: [n][turns], such as `turn_rewards`.
            outside: Value of tokens between turns (tool output, templates).
        """
        parts = [mask.new_full(mask.shape, outside) for mask in self.loss_masks]
        for part, row, turns in zip(parts, values, self.turns, strict=True):
            for value, turn in zip(row, turns, strict=True):
                part[turn.first : turn.last] = value
        return parts


@dataclass
class Advantages:
    """Per sample [response_length] tensors."""

    advantages: list[torch.Tensor]
    returns: list[torch.Tensor]


@dataclass
class LossInputs:
    """The response tokens of one micro-batch, concatenated: [T] tensors, T = sum(sample_lengths)."""

    log_probs: torch.Tensor
    """Log-probs of the policy being trained; they carry the gradient."""
    old_log_probs: torch.Tensor
    """Log-probs of the policy at the start of the update (detached)."""
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
    """Per-token results; the core masks and reduces all of them with the same reducer."""

    loss: torch.Tensor
    """[T]"""
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """name -> [T], detached; logged as `train/<name>`."""


class AdvantageEstimator(Protocol):
    """An RL algorithm. The trainer reads the class attributes and never the name.

    Subclass `slime_core.EstimatorBase`, which supplies the defaults. Constructed as `cls(args)`.
    """

    needs_values: ClassVar[bool]
    """True if the algorithm needs a critic: a critic is trained, and `AdvantageInputs.values` is set."""
    needs_teacher: ClassVar[bool]
    """True if `advantages` reads `AdvantageInputs.teacher_log_probs`; a run without `--use-opd` is refused."""
    needs_log_probs: ClassVar[bool]
    """True if `advantages` reads `AdvantageInputs.log_probs`; the trainer computes them even for a single step."""
    ratio_level: ClassVar[Literal["token", "sequence"]]
    """"sequence": the importance ratio is one number per response (GSPO)."""
    compares_group: ClassVar[bool]
    """True if rewards are compared within a group, so that a group of one has no learning signal."""
    needs_components: ClassVar[bool]
    """True if every reward needs parts, `RewardInputs.components`; the checks before a run look for them."""
    needs_greedy_baseline: ClassVar[bool]
    """True if the rollout adds a greedy response per prompt, scored, not trained on, for `RewardInputs.baselines`."""
    requires: ClassVar[Mapping[str, object]]
    """Values that settings must have for the algorithm, e.g. {"normalize_advantages": True}; checked at start-up."""
    defaults: ClassVar[Mapping[str, object]]
    """Defaults for settings that the user did not set; checked and shown like the user's own."""
    ignores: ClassVar[Sequence[str]]
    """Settings of other estimators that have no effect with this algorithm; giving one logs a warning."""

    def shape_rewards(self, args: Args, inputs: RewardInputs) -> list[float]:
        """Turn the rewards of the whole rollout into shaped rewards (group statistics go here)."""

    def shape_turns(self, args: Args, inputs: RewardInputs) -> list[list[float]]:
        """Turn the turns' rewards of the whole rollout into `AdvantageInputs.turn_rewards`, a number per turn.

        Statistics over turns go here, such as those of the turns of a group that began in the same state. Called after
        `shape_rewards`, with the rewards as they were before it.
        """

    def advantages(self, args: Args, inputs: AdvantageInputs) -> Advantages:
        """Turn shaped rewards into per-token advantages and returns, on one data-parallel rank."""

    def policy_loss(self, args: Args, inputs: LossInputs) -> LossOutputs:
        """Return the per-token policy loss."""
