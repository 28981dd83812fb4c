"""What the stages call and what plugins implement; nothing here runs.

Standard library only at run time (torch appears in annotations). User-facing functions take `args` first, with
attribute access to every setting, as in THUDM/slime. Components never hold a reference to the loop; the loop
builds them and calls them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

from slime_core.types import FilterDecision, GenerationOutput, Group, Sample, TrainBatch

if TYPE_CHECKING:
    import torch

Args: TypeAlias = Any
"""The run's settings as attributes: every flag's destination, `--custom-config-path` keys and plugin options."""

Reward: TypeAlias = float | Mapping[str, Any]
"""A number, or a mapping from which `--reward-key` picks one."""


# -- functions chosen by name or path --------------------------------------------------------------------


class RewardFn(Protocol):
    """Scores one sample. Coroutine or plain function."""

    def __call__(self, args: Args, sample: Sample, **kwargs: Any) -> Reward | Awaitable[Reward]: ...


class BatchRewardFn(Protocol):
    """Scores several samples at once, in order; recognised by a second parameter named `samples`."""

    def __call__(self, args: Args, samples: list[Sample], **kwargs: Any) -> list[Reward] | Awaitable[list[Reward]]: ...


class GenerateFn(Protocol):
    """Turns a prompt into a response. May also declare the keywords `evaluation` and `context`."""

    async def __call__(self, args: Args, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]: ...


class DynamicFilter(Protocol):
    """Keeps or drops a scored group."""

    def __call__(self, args: Args, samples: Group, **kwargs: Any) -> FilterDecision | bool: ...


class BufferFilter(Protocol):
    """Takes up to `num_samples` groups out of `buffer` (removing them) and returns them."""

    def __call__(self, args: Args, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]: ...


class GroupBuffer(Protocol):
    """Holds the groups that rollouts give back and decides what is drawn. Constructed as `cls(args)`.

    Subclass `slime_core.BufferBase`, which has every method's meaning and default.
    """

    def __len__(self) -> int:
        """Groups that wait."""

    def begin_rollout(self, rollout_id: int, weight_version: int) -> None:
        """A rollout is about to draw."""

    def add(self, groups: list[Group]) -> None:
        """Groups given back."""

    def take(self, num_groups: int) -> list[Group]:
        """Up to `num_groups` groups, removed."""

    def wants(self, prompt: Sample) -> bool:
        """Whether a fresh prompt is used now."""

    def observe(self, groups: list[Group], trained: bool) -> None:
        """Scored groups that go to training, or that the dynamic filter dropped."""

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call."""

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON holds it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""


class DataSource(Protocol):
    """Where prompt groups come from. Constructed as `cls(args)`.

    May also have `begin_rollout`, `observe` and `take_metrics`, called as those of `GroupBuffer`.
    """

    def get_samples(self, num_samples: int) -> list[Group]:
        """`num_samples` groups of `n_samples_per_prompt` samples each."""

    def add_samples(self, samples: list[Group]) -> None:
        """Give back groups to be drawn again first."""

    def save(self, rollout_id: int) -> None:
        """THUDM/slime's save; a source with `state_dict` is stored inside the checkpoint instead."""

    def load(self, rollout_id: int | None = None) -> None:
        """Inverse of `save`."""


# -- generation ------------------------------------------------------------------------------------------


class RolloutEngine(Protocol):
    """A token generator: in process or behind HTTP; the rollout code cannot tell which.

    Constructed as `cls(args)`; all methods run in one event loop, that of the rollout stage. An engine, and a trainer,
    whose class attribute `true_on_policy` is True compute the same bits under `--true-on-policy-mode`. An engine whose
    class attribute `returns_routed_experts` is True answers with `meta_info["routed_experts"]` under
    `--use-rollout-routing-replay`. An engine's class attribute `pause_modes` names the modes that `pause` takes, where
    they are others than "in_place" and "abort"; a method `stream` (arguments of `generate`) yields everything so far.

    Two more optional attributes of an engine's or trainer's class concern its settings: `uses: frozenset[str]`, the
    names it acts on among those that only some components do (`slime_core.config.support.BY_COMPONENT`; the others are
    refused or warned of; what base classes use counts), and the classmethod `check_settings(settings) -> list[str]`,
    called by every command that runs something, and by `slime check`, before anything starts: it returns warnings and
    raises ConfigError. An engine that starts servers may have the classmethod `launch_plan(settings, num_gpus=None)`,
    for `slime engines plan`: what it would start on this machine, or with so many GPUs, as an object with `describe()`
    and `to_dict()`.
    """

    weight_transports: ClassVar[tuple[str, ...]]
    """Of "tensor", "distributed", "disk" and "delta", those this engine takes, best first; it needs the methods of
    these only. An engine that learns it from its servers may set it again in `start`."""

    async def start(self) -> None:
        """Load the model of `args.hf_checkpoint`, or connect; returns when requests are served."""

    async def stop(self) -> None:
        """Abort what runs and free everything; safe to call twice."""

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
    ) -> GenerationOutput:
        """Continue `input_ids`; `sampling_params` has SGLang's keys. Raises EngineError."""

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all, with finish reason "abort" and the tokens it has."""

    async def pause(self, mode: str = "in_place") -> None:
        """Stop stepping: "in_place" keeps running requests, "abort" ends them."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def flush_cache(self) -> None:
        """Forget cached prefixes."""

    async def update_weights_from_tensor(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> Mapping[str, float] | None:
        """Copy named HF-layout tensors in; running requests go on with the new weights.

        This and the next three consume their argument, raise WeightSyncError, and may return metrics of the update.
        """

    async def update_weights_from_distributed(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> Mapping[str, float] | None:
        """The same by broadcast, to servers of other hosts too."""

    async def update_weights_from_disk(self, path: Path, version: int) -> Mapping[str, float] | None:
        """Load an HF-layout directory."""

    async def update_weights_from_delta(self, root: Path, version: int) -> Mapping[str, float] | None:
        """Bring a local copy of the model to a version below `root` (`weights.delta_apply`), and load it."""

    async def weight_checksums(self) -> dict[str, str]:
        """HF name -> `weights.checksum.tensor_checksum` of the tensor served.

        For `--check-weight-update-equal`. An engine that cannot tell may have `async def differing_weights(weights) ->
        list[str]` instead: the names whose tensors it serves differently.
        """

    async def address(self) -> tuple[str, int]:
        """Host and port that answer SGLang's HTTP API; an in-process engine serves from this call until `stop`."""

    async def info(self) -> dict[str, Any]:
        """`model_path`, `weight_version`, `max_context_length`, `num_running`, `num_waiting`, ..."""


@dataclass
class GenerateContext:
    """What a generate function gets when it declares the keyword `context`."""

    engine: RolloutEngine
    tokenizer: Any
    """HF tokenizer of `args.hf_checkpoint`."""
    evaluation: bool = False
    rollout_id: int | None = None


# -- algorithms ------------------------------------------------------------------------------------------


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


# -- training --------------------------------------------------------------------------------------------


@dataclass
class MicroBatchOutput:
    """A trainer's forward pass over one micro-batch: response tokens laid end to end, [T]."""

    positions: list[int]
    """Which samples of the batch, in order."""
    log_probs: torch.Tensor
    """float32, of the temperature-scaled distribution; empty from a critic."""
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    """float32, from a critic: the value of the state before each response token."""
    logits: torch.Tensor | None = None
    """float32 [1, tokens of the samples, prompts included, vocabulary], not divided by the temperature."""


LossFn: TypeAlias = "Callable[[MicroBatchOutput], tuple[torch.Tensor, dict[str, torch.Tensor]]]"
"""Micro-batch -> (scalar whose gradients are summed over micro-batches and ranks, metrics to be summed likewise).

All normalisation is inside: the sum over every micro-batch of every rank is the loss of the step."""


class Trainer(Protocol):
    """One role's model and optimizer on this process; data-parallel peers run the same calls.

    Constructed as `cls(args)`, or `cls(args, role="critic")` where the estimator needs values: the actor first, in
    one process, so that both share one process group. A critic starts from `args.critic_load` (without: from
    `args.hf_checkpoint`, with a new head), learns at `args.critic_lr` (without: at `args.lr`), answers `values` instead
    of `log_probs`, and has neither reference nor teacher. A batch given to a trainer holds this rank's samples only;
    `micro_batches` are lists of positions in it.

    A trainer whose class attribute `routing_replay` is True follows `TrainBatch.routed_experts` where it is set: all
    forward passes of the actor use the experts it names, with the weights of the present router, and `log_probs` and
    `log_probs_and_entropy` of the actor write the experts they used where it has -1. Reference, teacher and critic
    route freely.
    """

    rank: int
    """Data-parallel rank."""
    world_size: int
    """Data-parallel size."""
    device: torch.device

    def log_probs(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        *,
        role: Literal["actor", "ref", "teacher"] = "actor",
    ) -> list[torch.Tensor]:
        """[response_length] float32 per sample of the batch, no gradient; "teacher" is `args.opd_teacher_load`."""

    def log_probs_and_entropy(
        self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """`log_probs` of the actor and the entropy in nats of the distribution of each token, in one pass."""

    def values(self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """A critic's [response_length] float32 per sample of the batch, no gradient; the temperature plays no part."""

    def train_step(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        loss_fn: LossFn,
        *,
        with_entropy: bool = False,
        with_logits: bool = False,
    ) -> dict[str, float]:
        """One optimizer step; metrics are the summed ones of `loss_fn` plus `grad_norm` and `lr`.

        `with_entropy` and `with_logits` fill those fields of `MicroBatchOutput`, differentiable; a critic fills
        `values`.
        """

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over data-parallel ranks."""

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's bytes on every rank."""

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """HF names and tensors of the actor, in HF layout."""

    def update_reference(self) -> None:
        """Copy the actor's weights into the reference."""

    def save(self, directory: Path) -> None:
        """Write HF-layout weights to `directory` and everything else needed to go on to `directory/trainer`."""

    def load(self, directory: Path) -> None:
        """Inverse of `save`, bit for bit. Raises CheckpointError."""

    def close(self) -> None:
        """Leave process groups and free memory."""
