"""An environment: what a policy acts in, one instance per sample.

Implemented by plugins of kind `environments`, driven by the generator `multi_turn` (and by whoever else opens a
`slime_generator_multi_turn.EnvironmentSession`). Standard library only, so an environment can be written and tested
without torch. An instance lives for one sample and is never used again; what samples share (a data file, a connection)
belongs to the class or the module.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from slime_core.types import Sample

Observation: TypeAlias = str | Sequence[Mapping[str, Any]]
"""What the policy is shown: text, or chat messages (`{"role": ..., "content": ...}`)."""


@dataclass(frozen=True)
class Turn:
    """One turn of the policy, beside its text: for environments that declare the keyword `turn`."""

    number: int
    """Turns before this one in the trajectory."""
    raw: str
    """The text with its special tokens."""
    token_ids: Sequence[int]
    """As sampled."""
    finish_reason: str
    """"stop", or "length" where the token limit cut the turn."""


@dataclass(frozen=True)
class Step:
    """What an action led to."""

    observation: Observation = ""
    """What the policy sees next; shown only when it goes on."""
    reward: float = 0.0
    """For this action."""
    done: bool = False
    """The episode is over."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """For the sample's metadata, as JSON holds it; of all steps together, a later value wins."""


class Environment(Protocol):
    """One episode. Constructed as `cls(args)`; every method is a coroutine or a plain function.

    Where `reset` and `step` are coroutines, it runs in the event loop. Otherwise it has a thread of its own, in which
    methods may block, and which a deadline leaves behind; with the class attribute `execution = "process"` it has a
    process of its own, which a deadline kills. Three more methods are optional:

    - `snapshot() -> Any`: everything needed to go on, as JSON holds it; called after `reset` and each `step`.
    - `restore(sample, state) -> None`: in place of `reset`, on a new instance, with what `snapshot` returned.
      Without both, a sample that was interrupted starts again from the beginning.
    - `score(sample) -> float | Mapping`: the reward of the trajectory, called once, after the last step, before
      `close`.
    """

    def reset(self, sample: Sample) -> Observation | Awaitable[Observation | None] | None:
        """Begin the episode of a data row. What it returns follows the row's prompt; None adds nothing to it.

        The samples of a group should see the same: take randomness from `sample.group_index` or the row's metadata.
        """

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Act. `action` is the text of the turn without special tokens. May also declare the keyword `turn`."""

    def close(self) -> Awaitable[None] | None:
        """Free everything; called once, however the episode ended."""
