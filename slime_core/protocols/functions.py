"""Functions chosen by name or path, data sources, and buffers of prompt groups."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from slime_core.sample import FilterDecision, Group, Sample

if TYPE_CHECKING:
    from slime_core.config.schema import Args as Args
else:
    Args = Any  # a signature can be declared without loading the settings

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
    """Holds the groups that rollouts return and decides which are drawn. Constructed as `cls(args)`.

    Subclass `slime_core.BufferBase`, which documents every member and has its default.
    """

    replays: bool | int
    drops: bool
    num_dropped: int

    def __len__(self) -> int:
        """Return the number of waiting groups."""

    def begin_rollout(self, rollout_id: int, weight_version: int) -> None:
        """Prepare for a rollout that is about to draw groups."""

    def add(self, groups: list[Group]) -> None:
        """Add groups that a rollout returned."""

    def take(self, num_groups: int) -> list[Group]:
        """Remove and return up to `num_groups` groups."""

    def wants(self, prompt: Sample) -> bool:
        """Return whether to use a fresh prompt now."""

    def observe(self, groups: list[Group], trained: bool) -> None:
        """Observe scored groups that go to training (`trained`), or that the dynamic filter dropped."""

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the output of `state_dict`."""


class DataSource(Protocol):
    """A source of prompt groups. Constructed as `cls(args)`.

    May also have `begin_rollout`, `observe` and `take_metrics`, called like the methods of `GroupBuffer`.
    """

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return `num_samples` groups of `n_samples_per_prompt` samples each."""

    def add_samples(self, samples: list[Group]) -> None:
        """Return groups to the source; they are drawn first."""

    def save(self, rollout_id: int) -> None:
        """Save the state as in THUDM/slime; a source with `state_dict` is stored in the checkpoint instead."""

    def load(self, rollout_id: int | None = None) -> None:
        """Load the state that `save` wrote."""
