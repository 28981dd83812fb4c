"""Functions chosen by name or path, and where prompt groups come from and wait."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from slime_core.types import FilterDecision, Group, Sample

if TYPE_CHECKING:
    from slime_core.config.schema import Args as Args
else:
    Args = Any  # what declares a signature needs no settings loaded

Reward: TypeAlias = float | Mapping[str, Any]
"""A number, or a mapping from which `--reward-key` picks one."""


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

    Subclass `slime_core.BufferBase`, which has every member's meaning and default.
    """

    replays: bool | int
    drops: bool
    num_dropped: int

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
