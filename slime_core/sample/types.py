"""The results of filters, rollout functions and engines, the trainer's batch, and executions (fan-out).

The samples of one call of a generate function are one execution. Filters, buffers, statistics and metrics call
`executions` or `execution_rewards` before they count or average. Siblings are identified by `rollout_id` alone: each
sample without one is an execution of its own, and two samples of the run with the same `rollout_id` are siblings, at
any position.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from operator import mul
from typing import TYPE_CHECKING, Any

from slime_core.errors import DataError
from slime_core.sample.provenance import TurnSpan
from slime_core.sample.sample import Group, Sample

if TYPE_CHECKING:
    from slime_core.protocols import Args


@dataclass(frozen=True)
class FilterDecision:
    """The result of a dynamic filter for a group (THUDM/slime's `DynamicFilterOutput`)."""

    keep: bool
    reason: str | None = None
    """Reason of the drop, counted as `rollout/dynamic_filter/drop_<reason>`."""
    keep_when_insufficient: bool = False
    """True if a dropped group is kept when dropping it would leave too few groups."""
    spread: float | None = None
    """How far apart the group is in the number that the filter compares; None: the deviation of its rewards. Ranks the
    dropped groups for `--dynamic-sampling-on-exhausted keep`."""

    def __bool__(self) -> bool:
        return bool(self.keep)


DynamicFilterOutput = FilterDecision


@dataclass
class RolloutFnTrainOutput:
    """The result of a rollout function for training."""

    samples: list[Group]
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutFnEvalOutput:
    """The result of a rollout function for evaluation: `{dataset: {rewards, truncated, samples}}`."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass
class GenerationOutput:
    """The answer to an engine call; the lists have one entry per generated token."""

    token_ids: list[int]
    log_probs: list[float]
    """Log-probs of the temperature-scaled distribution, in nats (SGLang's convention). With `--use-sampling-mask` the
    distribution covers only the tokens that sampling could choose."""
    text: str
    meta_info: dict[str, Any]
    """SGLang's entries: `finish_reason` {"type": "stop" | "length" | "abort", ...}, `prompt_tokens`,
    `completion_tokens`, `cached_tokens`, `weight_version`, `id`. slime's engines add `token_weight_versions`, one int
    per token. With routing replay there is `routed_experts`, SGLang's base64 or another value that
    `RoutedExperts.of` reads, for all tokens of prompt and answer except the last. With `--use-sampling-mask` there is
    `output_token_sampling_mask`: for each token the ids that sampling could choose, empty if no id was excluded."""


_NO_COLUMNS = ("extras", "rollout_id", "weight_version")


@dataclass
class TrainBatch:
    """The samples of one rollout for the trainer: lists with one entry per sample.

    Token-level entries cover the response. All values are plain Python numbers, so a batch can be sent as JSON.
    """

    rollout_id: int
    tokens: list[list[int]]
    """[n][prompt + response]"""
    response_lengths: list[int]
    loss_masks: list[list[int]]
    """[n][response_length]; all zero for a removed sample."""
    rewards: list[float]
    """Rewards after the estimator's `shape_rewards` or `--custom-reward-post-process-path`."""
    raw_rewards: list[float]
    truncated: list[int]
    sample_indices: list[int]
    group_indices: list[int]
    rollout_ids: list[int]
    """Rollout id of each sample; fan-out siblings share one. `global_batch_size` counts these ids."""
    rollout_mask_sums: list[int]
    """Sum of the loss masks of all samples with the same rollout id, repeated per sample."""
    sibling_counts: list[int] = field(default_factory=list)
    """Number of samples with the same rollout id that have a token to train on, at least 1, repeated per sample.
    Computed if left out."""
    rollout_log_probs: list[list[float]] | None = None
    rollout_top_p_token_ids: list[list[int]] | None = None
    """[n] ids that sampling could choose for each sample's response tokens, token after token. Set with
    `--use-sampling-mask`; log-probs and entropy of all policies are then those of the softmax over these ids
    (`ops.SamplingMask`)."""
    rollout_top_p_token_offsets: list[list[int]] | None = None
    """[n][response_length + 1] offsets of each token's ids; for a token without ids sampling could choose any id."""
    teacher_log_probs: list[list[float]] | None = None
    components: list[dict[str, float]] = field(default_factory=list)
    """[n] parts of each reward by name."""
    turns: list[list[TurnSpan]] = field(default_factory=list)
    """[n] turns of each response. Computed if left out: the response is one turn."""
    turn_rewards: list[list[float]] = field(default_factory=list)
    """[n][turns] after the estimator's `shape_turns`. Computed if left out: the turns' own rewards."""
    source_names: list[str | None] | None = None
    train_metadata: list[dict[str, Any] | None] | None = None
    token_weight_versions: list[list[int]] | None = None
    """[n][response_length] version that sampled each token, `NOT_SAMPLED` for others; None: all `weight_version`."""
    routed_experts: list[Any] | None = None
    """[n] experts that the trainer uses instead of its router's choice, [len(tokens) - 1, layers, top_k], -1 if the
    router decides. Each is a value that `RoutedExperts.of` reads, or None; a trainer gets int32 arrays."""
    multimodal_train_inputs: list[Any] | None = None
    """[n] image inputs of a vision-language model (read by `multimodal.TrainInputs.of`), or None for a sample without
    inputs; None if no sample has inputs."""
    weight_version: int = 0
    """Version of the weights that this batch updates."""
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """Further per-sample columns from `--custom-convert-samples-to-train-data-path`."""

    def __post_init__(self) -> None:
        self.components = self.components or [{} for _ in self.tokens]
        turns = self.turns or [[TurnSpan(0, length)] for length in self.response_lengths]
        self.turns = [[TurnSpan(*turn) for turn in row] for row in turns]  # JSON has lists
        self.turn_rewards = self.turn_rewards or [[turn.reward or 0.0 for turn in row] for row in self.turns]
        if not self.sibling_counts:
            self.sibling_counts = sibling_counts(self.rollout_ids, [any(mask) for mask in self.loss_masks])

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, indices: Sequence[int]) -> TrainBatch:
        """Return the samples at `indices`, in that order."""

        def pick(value: Any) -> Any:
            return [value[i] for i in indices] if isinstance(value, list) else value

        chosen = {f.name: pick(getattr(self, f.name)) for f in fields(self) if f.name != "extras"}
        return TrainBatch(**chosen, extras={k: pick(v) for k, v in self.extras.items()})

    def to_rollout_data(self) -> dict[str, Any]:
        """Return THUDM/slime's `rollout_data` dictionary: same keys, without absent columns.

        `metadata` is the samples' `train_metadata`.
        """
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NO_COLUMNS}
        data = {k: v for k, v in data.items() if v is not None}
        data["raw_reward"] = data.pop("raw_rewards")
        if "routed_experts" in data:
            data["rollout_routed_experts"] = data.pop("routed_experts")
        data["metadata"] = [given or {} for given in self.train_metadata or [None] * len(self)]
        data["total_lengths"] = [len(t) for t in self.tokens]
        return {**data, **self.extras}


def executions(samples: Iterable[Sample]) -> list[Group]:
    """Group fan-out siblings; executions are in the order of their first samples."""
    samples = list(samples)
    ids = _ids(samples)
    if ids is None:
        return [[s] for s in samples]
    found: dict[Hashable, Group] = {}
    for key, sample in zip(ids, samples):
        found.setdefault(key, []).append(sample)
    return list(found.values())


def _ids(samples: Sequence[Sample]) -> list[Hashable] | None:
    """Return [n] keys, equal for siblings; None if no sample has a `rollout_id`, as in most rollouts."""
    ids: list[Hashable] = [s.rollout_id for s in samples]
    if ids.count(None) == len(ids):
        return None
    return [("no id", place) if one is None else one for place, one in enumerate(ids)]


def execution_rewards(args: Args, samples: Iterable[Sample], component: str | None = None) -> list[float]:
    """Return a scalar reward per execution: the mean reward of its scored siblings; unscored executions are left out.

    Args:
        args: The run's settings; `reward_key` picks from mapping rewards.
        samples: Samples of one group or several.
        component: Name in `Sample.reward_components` of the part to return instead; samples without it are left out.

    Raises:
        TypeError, KeyError: A reward is a mapping, and `reward_key` names no number in it.
        DataError: No scored sample has the component.
    """
    scored = [s for s in samples if s.reward is not None]
    if component is None:
        return [mean([float(s.get_reward_value(args)) for s in siblings]) for siblings in executions(scored)]
    having = [s for s in scored if component in (s.reward_components or {})]
    if scored and not having:
        raise DataError(
            f"component {component!r}: the reward of sample {scored[0].index} has the parts"
            f" {', '.join(scored[0].reward_components or ()) or 'none'} (Sample.reward_components)"
        )
    return [mean([(s.reward_components or {})[component] for s in siblings]) for siblings in executions(having)]


def shares(samples: Sequence[Sample]) -> list[float]:
    """Return [n] weights: 1 / number of each sample's siblings among `samples`, itself included."""
    ids = _ids(samples)
    return [1.0] * len(samples) if ids is None else [1.0 / count for count in sibling_counts(ids)]


def sibling_counts(ids: Sequence[Hashable], counted: Sequence[bool] | None = None) -> list[int]:
    """Return [n] counts of the entries with each entry's id, itself included.

    Args:
        ids: [n].
        counted: [n] whether each entry counts. An id without counted entries gives 1. None: all count.
    """
    counts = Counter(ids if counted is None else [i for i, counts in zip(ids, counted, strict=True) if counts])
    return [max(counts[i], 1) for i in ids]


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; if all values are equal, exactly that value, so comparisons with it hold."""
    first = values[0]
    return first if values.count(first) == len(values) else math.fsum(values) / len(values)


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return sum(values * weights) / sum(weights). Raises ZeroDivisionError if the weights add up to 0."""
    return math.fsum(map(mul, values, weights)) / math.fsum(weights)
