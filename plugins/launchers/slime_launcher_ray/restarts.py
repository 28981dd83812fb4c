"""`--max-trainer-restarts`: resume from the last commit after a trainer rank died, and keep the live engines.

Independent of the launcher, which detects the death and starts the new trainer processes in between::

    death --> Restarts.after(error, r) --> raises: given up, with the reason
                     |
                     +--> Restart: pause(...), end what is left of the old ranks, build new ones,
                                   start = rewind(...), the loop again from `start`

All ranks are replaced, because the live ranks wait in collective calls with the dead rank. `rewind` is a resume in a
live process. Everything after the commit is discarded, for generation as for training, recorded metrics included. So a
run with a restart leaves the same results as a run without a restart.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_runs.events import EventLog

from slime_core.checkpoint.run_dir import cut_after
from slime_core.checkpoint.store import CheckpointStore, read_state, verify
from slime_core.errors import TrainError
from slime_core.launch.journal import Journal
from slime_core.launch.resume import unfinished_evaluations

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0


@dataclass(frozen=True)
class Restart:
    """A granted restart."""

    commit: Path
    """Verified commit that the new ranks load."""
    number: int
    """Number of this restart in the run, from 1."""
    limit: int
    pause_s: float
    """Seconds to wait first: 0 if the run has committed since the last restart, else 5, 10, 20 and at most 60."""

    def pause(self, ended: threading.Event) -> bool:
        """Wait `pause_s`, or until `ended` is set because the run is stopping; return whether to continue."""
        return not ended.wait(self.pause_s)

    def __str__(self) -> str:
        wait = f" in {self.pause_s:g} s" if self.pause_s else ""
        return f"restart {self.number} of {self.limit} from {self.commit.name}{wait}; the engines stay"


class Restarts:
    """Count the restarts of a run and refuse more than the limit.

    Args:
        limit: `--max-trainer-restarts`.
        store: Checkpoint store of the run.
        events: Log that gets one event per restart.
    """

    def __init__(self, limit: int, store: CheckpointStore, events: EventLog) -> None:
        self.limit = limit
        self.used = 0
        self._store = store
        self._events = events
        self._from: Path | None = None
        self._in_place = 0
        """Restarts in a row from the same commit."""

    def after(self, error: Exception, rollout_id: int) -> Restart:
        """Decide on a restart after a death in rollout `rollout_id`; `error` names the rank, process and how it ended.

        Raises:
            TrainError: No restart: none is left, or there is no commit to go back to.
            CheckpointError: The last commit is torn.
        """
        if not self.limit:
            raise error
        if self.used >= self.limit:
            raise TrainError(
                f"{error}; given up after {self.used} restart{'s' * (self.used > 1)} (--max-trainer-restarts"
                f" {self.limit}). Earlier commits are intact: --load goes on from the last one"
            ) from error
        commits = self._store.commits()
        if not commits:
            raise TrainError(
                f"{error}; not restarted, since there is no commit yet in {self._store.root}: a smaller --save-interval"
                " or --save-minutes makes the first one earlier"
            ) from error
        commit = verify(commits[-1])
        self._in_place = self._in_place + 1 if commit == self._from else 0
        self._from = commit
        self.used += 1
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._in_place - 1)) if self._in_place else 0.0
        restart = Restart(commit, self.used, self.limit, pause)
        self._events.write(
            "trainer_restart", error=str(error), rollout_id=rollout_id, commit=commit.name, restart=self.used,
            limit=self.limit,
        )  # fmt: skip
        return restart


def rewind(restart: Restart, *, trainer: Any, stage: Any, weights: Any, journal: Journal) -> int:
    """Put a live run into the state of the commit and return the number of the rollout to continue with.

    Args:
        restart: The restart that `Restarts.after` granted.
        trainer: The new ranks. They were made with `args.finetune` False, so that they load all of the commit.
        stage: The live rollout stage, in which nothing runs any more.
        weights: What pushes them; the loop's first push makes the engines serve the commit's weights.
        journal: Of the run.

    Raises:
        CheckpointError: The commit does not fit the new ranks.
    """
    state = read_state(restart.commit)
    start = int(state["rollout_id"]) + 1
    trainer.load(restart.commit)
    journal.store.rewind(restart.commit)
    stage.load(restart.commit, start - 1)
    weights.version = state["weight_version"] - 1
    journal.rewind(restart.commit, state)
    cut_after(journal.run_dir, start, unfinished_evaluations(restart.commit))
    return start
