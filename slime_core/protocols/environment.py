"""Protocol of environments, in which a policy acts; each sample has its own instance.

Plugins of kind `environments` implement it. The generator `multi_turn` drives it, like any other code that opens a
`slime_generators.multi_turn.EnvironmentSession`. This module needs the standard library only, so an environment can be
written and tested without torch. An instance serves one sample and is never reused. State that samples share (a data
file, a connection) belongs to the class or the module.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from slime_core.sample import Sample

Observation: TypeAlias = str | Sequence[Mapping[str, Any]]
"""Input shown to the policy: text, or chat messages (`{"role": ..., "content": ...}`)."""


@dataclass(frozen=True)
class Turn:
    """Details of a policy's turn besides its text, for environments that declare the keyword `turn`."""

    number: int
    """Number of earlier turns in the trajectory."""
    raw: str
    """The text with its special tokens."""
    token_ids: Sequence[int]
    """Token ids as sampled."""
    finish_reason: str
    """"stop", or "length" if the token limit cut the turn."""


@dataclass(frozen=True)
class Step:
    """The result of an action."""

    observation: Observation = ""
    """Next observation of the policy; shown only if the episode continues."""
    reward: float = 0.0
    """Reward for this action."""
    done: bool = False
    """True if the episode is over."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for the sample's metadata; the values of all steps are merged, and a later value wins."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Parts of `reward` by name; their sums over the steps become `Sample.reward_components`."""
    state: str | None = None
    """Id of the state that `observation` shows, equal for equal states of a group (`TurnSpan.state`)."""


class Environment(Protocol):
    """An episode. Constructed as `cls(args)`; every method is a coroutine or a plain function.

    If `reset` and `step` are coroutines, the environment runs in the event loop. Otherwise it has its own thread, in
    which methods may block; after a missed deadline the thread is abandoned. With the class attribute
    `execution = "process"` it has its own process, which is killed after a missed deadline. Further methods are
    optional:

    - `snapshot() -> Any`: return the state needed to resume, as JSON values; called after `reset` and each `step`.
    - `restore(sample, state) -> None`: called in place of `reset`, on a new instance, with the value of `snapshot`.
      Without both methods, an interrupted sample starts again from the beginning.
    - `score(sample) -> float | Mapping`: return the reward of the trajectory; called once, after the last step and
      before `close`.
    - `close() -> None`: free all resources; called once, however the episode ended.
    """

    def reset(self, sample: Sample) -> Observation | Awaitable[Observation | None] | None:
        """Begin the episode of a data row. The returned observation follows the row's prompt; None adds nothing.

        May leave out `sample`, may declare the keyword `seed`, a number that the samples of a group share, and may
        return a `Step`, whose `state` counts, or (observation, info). The samples of a group should see the same.
        """

    def step(self, action: str) -> Step | tuple[Any, ...] | Awaitable[Step | tuple[Any, ...]]:
        """Perform `action`, the turn's text without special tokens. May also declare the keyword `turn`.

        Returns a `Step`, or (observation, reward, done), with `info` behind it, or gymnasium's five values. The reward
        may be a mapping: the sum of its parts, which are `Step.components`.
        """
