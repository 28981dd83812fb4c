"""Recover from a dead trainer actor: new ranks from the last commit, while rollout, rewards and engines keep running.

The driver's `launch.lead.lead` calls `Recovery.recover` after a `TrainerDied`, and runs the loop again::

    rollout actor: abandon     generation, evaluation and weight transfer end; the engine keeps running
    old ranks: killed          live ranks wait in collective calls with the dead rank
    new ranks: build           in the same places, with the same checks as at the start
    restarts.rewind            trainer, data, ledger, metrics and commits as at the commit; the loop begins with a push

The rank may have died during a weight update, so the engines may serve any mix of weights until the first push. Nothing
is generated before the push.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

from slime_runs.events import EventLog

from slime_core.checkpoint.store import read_state
from slime_core.launch.journal import Journal
from slime_launcher_ray.actors import Actors
from slime_launcher_ray.remote_stages import RemoteLearner, RemoteRollout, RemoteTrainers, RemoteWeights
from slime_launcher_ray.restarts import Restarts, rewind
from slime_launcher_ray.wait import CONTROL, TrainerDied


class Recovery:
    """Restarts of one run's trainer.

    Args:
        limit: `--max-trainer-restarts`.
        actors: The actors of the run.
        stage: Proxy of the rollout stage; `learner` and `weights` are the proxies of the trainer's ranks.
        replace_ranks: Creates new ranks that continue with the given rollout.
    """

    def __init__(
        self,
        limit: int,
        actors: Actors,
        stage: RemoteRollout,
        learner: RemoteLearner,
        weights: RemoteWeights,
        replace_ranks: Callable[[int], None],
    ) -> None:
        self._limit = limit
        self._actors = actors
        self._stage, self._learner, self._weights = stage, learner, weights
        self._replace_ranks = replace_ranks
        self._restarts: Restarts | None = None

    def recover(self, error: Exception, journal: Journal) -> int:
        """Restore the run to its last commit, with a new trainer, and return the rollout to continue with.

        Raises:
            TrainError: Recovery failed; the message has the reason and the end of the dead actor's log.
            SlimeError: Rollout or engine have failed too.
        """
        if self._restarts is None:
            self._restarts = Restarts(self._limit, journal.store, EventLog(journal.run_dir))
        while True:
            restart = self._restarts.after(error, self._learner.rollout_id)
            print(f"slime: {_first_line(error)}; {restart}", file=sys.stderr, flush=True)
            restart.pause(threading.Event())
            try:
                # Kill the ranks first: a live rank may be in a weight update, which the rollout actor then ends.
                self._actors.end_ranks()
                self._actors.rollout.call("abandon", group=CONTROL)
                self._replace_ranks(_first(restart.commit))
                trainers = RemoteTrainers(self._actors.ranks)
                return rewind(restart, trainer=trainers, stage=self._stage, weights=self._weights, journal=journal)
            except TrainerDied as another:
                error = another


def _first(commit: Path) -> int:
    return int(read_state(commit)["rollout_id"]) + 1


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(":;")
