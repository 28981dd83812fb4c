"""The trainers of a run: the actor's and, for estimators with values, the critic's; in one process or in several.

`Trainers` are those of one process, built once, saved, loaded and closed together. The actor is built first and closed
last, since it owns the process group that both use. Of several processes rank 0 runs the loop and announces collective
work, and the other ranks follow::

    rank 0   {"do": "train", batch}  Learner.train | {"do": "push"}  WeightSync       | ... | {"do": "end"}
    others   Follower                Learner.train |                 FollowingWeights | ... |

The other ranks know nothing of rollouts, evaluations and intervals, in any mode. While rank 0 works alone, they wait in
a collective call that has a deadline (`--distributed-timeout-minutes`). Rank 0 sends several keep-alive messages within
the deadline. Only a process that hangs or has died misses it, and a rollout may take any time. Ranks here are
processes; several of them may form one data-parallel rank.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson

from slime_core.errors import CheckpointError, RolloutError
from slime_core.plugins.hooks import Hooks
from slime_core.plugins.signatures import declared
from slime_core.protocols import Args, Trainer
from slime_core.sample import TrainBatch
from slime_core.sample.routed_experts import json_default
from slime_core.waits import waiting

if TYPE_CHECKING:
    from slime_core.learning.learner import Learner
    from slime_core.weights.collective import FollowingWeights

Role = Literal["actor", "critic"]
_CRITIC = "critic"
"""Folder of a checkpoint in which the critic's trainer saves."""
_OF_CRITIC: Mapping[str, object] = {
    "kl_coef": 0.0,
    "use_kl_loss": False,
    "use_opd": False,
    "keep_old_actor": False,
    "custom_advantage_function_path": None,
}
"""Settings that are fixed for a critic's trainer, which has no reference, no teacher and no advantages."""


def role_args(args: Args, role: Role) -> Args:
    """Return the settings of a role's trainer: a copy of `args`, or `args` itself if nothing differs."""
    own = args.role_settings.get(role, {})
    if role == "critic":
        own = {**_OF_CRITIC, **own}
        if "lr" in own:
            own["critic_lr"] = None  # the entry says it for this role alone, --critic-lr for every critic
    return args.model_copy(update=own) if own else args


class Trainers:
    """The actor's trainer and, if the estimator needs values, the critic's.

    Args:
        args: The run's settings; each role's trainer gets them with the role's overrides in `--megatron-config-path`.
        make: Trainer class or factory, called as `make(args)` and `make(args, role="critic")`.
        with_critic: Whether the estimator needs values.
        hooks: Hooks of the process, passed to a class that takes the keyword `hooks` because it calls hooks itself.
    """

    def __init__(
        self, args: Args, make: Callable[..., Trainer], *, with_critic: bool, hooks: Hooks | None = None
    ) -> None:
        self.args = args
        offered = {"hooks": hooks} if declared(make, ("hooks",)) else {}
        self.actor = make(role_args(args, "actor"), **offered)
        self.critic: Trainer | None = None
        if with_critic:
            try:
                self.critic = make(role_args(args, "critic"), role=_CRITIC, **offered)
            except BaseException:
                self.actor.close()
                raise

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank."""
        return self.actor.broadcast(payload)

    def save(self, directory: Path) -> None:
        """Save the actor into `directory` and the critic into `directory/critic`."""
        self.actor.save(directory)
        if self.critic is not None:
            self.critic.save(directory / _CRITIC)

    def load(self, directory: Path) -> None:
        """Load what `save` wrote; `--finetune` from a directory without a critic keeps the critic's initial weights.

        Raises:
            CheckpointError: The checkpoint does not fit, or lacks the critic of the run to resume.
        """
        self.actor.load(directory)
        if self.critic is None:
            return
        folder = directory / _CRITIC
        if folder.is_dir():
            self.critic.load(folder)
        elif not self.args.finetune:
            raise CheckpointError(
                f"{directory}: no {_CRITIC}/ there: it was saved by a run without a critic; to start from its weights"
                " with a new critic, add --finetune"
            )

    def offload(self) -> None:
        """Release the memory that only training needs (`--offload-train`); return when all processes have."""
        for trainer in self._both():
            trainer.offload()

    def onload(self) -> None:
        """Take the released memory again."""
        for trainer in self._both():
            trainer.onload()

    def _both(self) -> list[Any]:  # only trainers whose traits say so have `offload`
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def close(self) -> None:
        """Leave process groups and free memory; the actor, which joined the groups, closes last."""
        try:
            if self.critic is not None:
                self.critic.close()
        finally:
            self.actor.close()


def current_device() -> int | None:
    """Return CUDA's device of this thread, if a trainer uses one; another thread begins with device 0."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())


def use_device(device: int | None) -> None:
    """Set CUDA's device of this thread."""
    if device is not None:
        sys.modules["torch"].cuda.set_device(device)


_AT_WORK = {"do": "wait"}
_WORDS_PER_DEADLINE = 4
_LAST_WORD = 5.0
"""Seconds to wait at the end for a running collective call; after that no message is sent."""


class Leader:
    """Rank 0's side: announces each collective call to the other processes, and sends keep-alives in between.

    Args:
        trainer: Trainer that holds the connection to the other processes.
        deadline_minutes: Deadline of their wait for a message: `--distributed-timeout-minutes`.
    """

    def __init__(self, trainer: Trainer, deadline_minutes: float) -> None:
        self._trainer = trainer
        self._period = deadline_minutes * 60 / _WORDS_PER_DEADLINE
        self._turn = threading.Lock()
        """Lock that orders collective calls: only its holder makes them."""
        self._over = threading.Event()
        self._problem: Exception | None = None
        """Error of a failed keep-alive message."""
        self._failed = False
        """True after a collective call raised: the other processes may still be inside it."""
        self._device = current_device()
        threading.Thread(target=self._say_at_work, name="tells the other ranks", daemon=True).start()

    @contextmanager
    def together(self, do: str, **details: object) -> Iterator[None]:
        """Announce `do` and hold the turn while the block runs, which the other processes run, too.

        Raises:
            RolloutError: A keep-alive message to the other processes failed.
        """
        with waiting("the thread that tells other ranks", deadline=None, then="--distributed-timeout-minutes ends it"):
            self._turn.acquire()
        try:
            if self._problem is not None:
                raise RolloutError(f"another training process has ended, or hangs: {self._problem}") from self._problem
            self._tell({"do": do, **details})
            yield
        except BaseException:
            self._failed = True
            raise
        finally:
            self._turn.release()

    def end(self, error: BaseException | None = None) -> None:
        """Send the end of the run and its error, unless the other processes may still be inside a call."""
        self._over.set()
        if not self._turn.acquire(timeout=_LAST_WORD):
            return
        try:
            if not self._failed and self._problem is None:
                self._tell({"do": "end"} | ({} if error is None else {"error": f"{type(error).__name__}: {error}"}))
        finally:
            self._turn.release()

    def _say_at_work(self) -> None:
        use_device(self._device)
        while not self._over.wait(self._period):
            with self._turn:
                if self._failed or self._over.is_set():
                    return
                try:
                    self._tell(_AT_WORK)
                except Exception as error:
                    self._problem = error
                    return

    def _tell(self, word: Mapping[str, object]) -> None:
        self._trainer.broadcast(orjson.dumps(word, default=_json))


def _json(value: object) -> object:
    return asdict(value) if isinstance(value, TrainBatch) else json_default(value)


class LedTrainers:
    """Rank 0's trainers as its launcher sees them: the other processes run every call, too."""

    def __init__(self, leader: Leader, trainers: Trainers) -> None:
        self._leader, self._trainers = leader, trainers

    def save(self, directory: Path) -> None:
        """Save every process's part of a checkpoint."""
        self._all("save", directory)

    def load(self, directory: Path) -> None:
        """Load every process's part of a checkpoint; inverse of `save`."""
        self._all("load", directory)

    def offload(self) -> None:
        """Free the memory that only training needs; return when all processes have done so."""
        self._all("offload")

    def onload(self) -> None:
        """Take the memory for training again."""
        self._all("onload")

    def _all(self, do: str, *paths: Path) -> None:
        with self._leader.together(do, paths=[*map(str, paths)]):
            getattr(self._trainers, do)(*paths)


class Follower:
    """The side of ranks 1..n-1: runs the calls that rank 0 announces, and records nothing.

    Args:
        trainers: Trainers of this process.
        learner: Learner on these trainers.
        weights: A `weights.collective.FollowingWeights`.
    """

    def __init__(self, trainers: Trainers, learner: Learner, weights: FollowingWeights) -> None:
        self._trainers, self._learner, self._weights = trainers, learner, weights

    def run(self) -> None:
        """Run announced calls until rank 0 ends the run. Raises RolloutError if rank 0 failed."""
        while (word := self._next())["do"] != "end":
            self._follow(**word)
        if "error" in word:
            raise RolloutError(f"rank 0 failed: {word['error']}")

    def _next(self) -> dict[str, Any]:
        """Wait for the next message that is no keep-alive; every message comes within the process group's deadline."""
        word: dict[str, Any] = _AT_WORK
        while word == _AT_WORK:
            with waiting("a word of rank 0", deadline=None, then="--distributed-timeout-minutes ends it"):
                word = orjson.loads(self._trainers.broadcast(None))
        return word

    def _follow(self, do: str, **details: Any) -> None:
        if do == "train":
            self._learner.train(details["rollout_id"], TrainBatch(**details["batch"]))
        elif do == "push":
            self._weights.push()
        else:
            getattr(self._trainers, do)(*map(Path, details["paths"]))
