"""The stages as the driver's loop sees them: each forwards its calls to actors.

`loop.train` runs over `RemoteRollout`, `RemoteLearner` and `RemoteWeights`; journal, hooks and run directory stay in
the driver. `RemoteBatch` is a reference; the batch itself goes from the rollout actor to the trainer's actors and never
reaches the driver.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import RolloutInterrupted, rollout_name
from slime_core.waits import waiting
from slime_launcher_ray.shell import end_quietly
from slime_launcher_ray.wait import CONTROL, EVALUATION, TURNS, WORK, Member, awaited, gather

STOP_DEADLINE = 30.0
"""Seconds that an actor has to stop its engines and workers before it is killed."""

_LAST_WORDS = 10.0


@dataclass
class RemoteBatch:
    """A train batch in the object store."""

    reference: Any
    num_samples: int
    num_tokens: int

    def __len__(self) -> int:
        return self.num_samples


@dataclass
class RemoteResult:
    """The batch reference and the metrics of a rollout."""

    batch: RemoteBatch
    metrics: dict[str, float]


class RemoteRollout:
    """`loop.Rollout`, and the stage for checkpoints: the actor generates, with `--async` ahead of the loop.

    Args:
        member: The rollout actor.
        hooks: The run's hooks.
        tells_groups: Whether a hook needs the samples of a rollout.
        ahead: Whether stage methods return awaitables, so that the loop can do other work in between.
    """

    def __init__(self, member: Member, hooks: Any, *, tells_groups: bool, ahead: bool) -> None:
        self._member = member
        self._hooks = hooks
        self._tells_groups = tells_groups
        self._ahead = ahead

    def start(self) -> Any:
        """Start the engine."""
        return self._verb("start", self._member.submit("start"))

    def generate(self, rollout_id: int) -> Any:
        """Return the rollout's batch and metrics. Raises the stage's errors, or RolloutInterrupted if interrupted."""
        batch, told, groups = self._member.submit("generate", rollout_id, num_returns=3)

        def result(found: dict[str, Any]) -> RemoteResult:
            if "interrupted" in found:
                raise RolloutInterrupted(drew=found["interrupted"])
            metrics: dict[str, float] = found["metrics"]
            if self._tells_groups:
                samples = self._member.get(groups, f"samples of {rollout_name(rollout_id)}")
                if samples is not None:  # None: the batch is from a commit, and the hooks ran when it was generated
                    self._hooks.slime_rollout_end(rollout_id=rollout_id, groups=samples, metrics=metrics)
            return RemoteResult(RemoteBatch(batch, *found["size"]), metrics)

        return self._verb(f"{rollout_name(rollout_id)}", told, result)

    def evaluate(self, rollout_id: int) -> Any:
        """Return `eval/...` metrics. Raises RolloutInterrupted after `interrupt`."""

        def metrics(found: dict[str, float] | None) -> dict[str, float]:
            if found is None:
                raise RolloutInterrupted(drew=False)
            return found

        lane = EVALUATION if self._ahead else WORK
        return self._verb("evaluation", self._member.submit("evaluate", rollout_id, group=lane), metrics)

    def before_push(self) -> Any:
        """Wait until the engines may take new weights."""
        return self._turn("before_push")

    def before_save(self) -> Any:
        """Wait until groups that were generated ahead can be part of a commit."""
        return self._turn("before_save")

    def _turn(self, method: str) -> Any:
        return self._verb(method, self._member.submit(method, group=TURNS)) if self._ahead else None

    def _verb(self, what: str, reference: Any, result: Callable[[Any], Any] = lambda found: found) -> Any:
        """Return `result` of the actor's return value, or a coroutine of it, and log the actor's warnings."""

        def told(found: Any) -> Any:
            relay([self._member])
            return result(found)

        async def later() -> Any:
            return told(await awaited(self._member, reference, what))

        return later() if self._ahead else told(self._member.get(reference, what))

    def release_memory(self) -> None:
        """Make the engine free its memory."""
        self._member.call("release_memory")

    def resume_memory(self, tags: tuple[str, ...]) -> None:
        """Make the engine allocate the memory of the tags again."""
        self._member.call("resume_memory", tags)

    def save(self, directory: Path, rollout_id: int) -> None:
        """Save the generation side's part of a commit."""
        self._member.call("save", directory.absolute(), rollout_id)

    def load(self, directory: Path, rollout_id: int) -> str:
        """Load the generation side's part of a commit; inverse of `save`."""
        return str(self._member.call("load", directory.absolute(), rollout_id))

    def interrupt(self) -> None:
        """End the running rollout. A signal handler may call this method, so the actor is called in a thread."""
        threading.Thread(
            target=lambda: self._member.submit("interrupt", group=CONTROL), name="interrupts the rollout", daemon=True
        ).start()

    def stop(self) -> None:
        """Free engine and workers; safe to call twice, and when the actor is dead."""
        end_quietly(lambda: stopped([self._member], "stop"))


class RemoteLearner:
    """`loop.Learning` over all ranks."""

    def __init__(self, ranks: Sequence[Member]) -> None:
        self._ranks = ranks
        self.rollout_id = -1
        """Rollout that is trained on now, or was last; -1 before the first."""

    def train(self, rollout_id: int, batch: RemoteBatch) -> dict[str, float]:
        """Run all optimizer steps of a rollout on every rank; return rank 0's metrics."""
        self.rollout_id = rollout_id
        references = [rank.submit("train", rollout_id, batch.reference) for rank in self._ranks]
        metrics: dict[str, float] = gather(self._ranks, references, f"training on {rollout_name(rollout_id)}")[0]
        relay(self._ranks)
        return metrics


class RemoteWeights:
    """`loop.Weights` in which rank 0 pushes and all ranks take part; calls `on_update` with each served version."""

    def __init__(self, ranks: Sequence[Member], on_update: Callable[[int], object]) -> None:
        self._ranks = ranks
        self._on_update = on_update
        self._version: int = ranks[0].call("version")

    @property
    def version(self) -> int:
        """Version that was served last."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._ranks[0].call("set_version", version)
        self._version = version

    def push(self) -> dict[str, float]:
        """Make the engines serve the newest weights."""
        references = [rank.submit("push") for rank in self._ranks]
        metrics, version = gather(self._ranks, references, "the weight update")[0]
        relay(self._ranks)
        if version != self._version:
            self._version = version
            self._on_update(version)
        return dict(metrics)


class RemoteTrainers:
    """The trainers of all ranks, for checkpoints and for offloading."""

    def __init__(self, ranks: Sequence[Member]) -> None:
        self._ranks = ranks

    def save(self, directory: Path) -> None:
        """Save every rank's part of a checkpoint."""
        self._everywhere("save", directory)

    def load(self, directory: Path) -> None:
        """Load every rank's part of a checkpoint; inverse of `save`."""
        self._everywhere("load", directory)

    def offload(self) -> None:
        """Free the memory that only training needs, on all ranks; return when all have done so."""
        self._everywhere("offload")

    def onload(self) -> None:
        """Take the memory for training again, on all ranks."""
        self._everywhere("onload")

    def _everywhere(self, method: str, *paths: Path) -> None:
        references = [rank.submit(method, *(path.absolute() for path in paths)) for rank in self._ranks]
        gather(self._ranks, references, " ".join([method, *map(str, paths)]))


def relay(members: Sequence[Member]) -> None:
    """Log the actors' warnings since the last call in this process."""
    references = [member.submit("take_messages", group=CONTROL) for member in members]
    for messages in gather(members, references, "warnings"):
        _say(messages)


def relay_last(members: Sequence[Member]) -> None:
    """Log the actors' last warnings before the end, from the actors that respond within `_LAST_WORDS` seconds."""
    import ray

    references = [member.submit("take_messages", group=CONTROL) for member in members]
    with waiting("the actors' last warnings", deadline=_LAST_WORDS, then="they stay in the actors' logs"):
        for reference in ray.wait(references, num_returns=len(references), timeout=_LAST_WORDS)[0]:
            end_quietly(lambda reference=reference: _say(ray.get(reference, timeout=_LAST_WORDS)))  # type: ignore[misc]


def _say(messages: list[tuple[str, int, str]]) -> None:
    for name, level, text in messages:
        logging.getLogger(name).log(level, "%s", text)


def stopped(members: Sequence[Member], method: str) -> None:
    """Call a method of all actors before the end, concurrently with their other calls, for at most `STOP_DEADLINE`."""
    import ray

    references = [member.submit(method, group=CONTROL) for member in members]
    ray.wait(references, num_returns=len(references), timeout=STOP_DEADLINE)
