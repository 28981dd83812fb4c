"""One life of a simulated run: the real stages and the real loop, between a simulated engine and a simulated trainer.

    real       loop, rollout stage, rollout functions, reward stage, filters, data source, buffer, ledger, journal,
               checkpoint store, resume
    simulated  time, engine, generate function, reward function, trainer, weights, the disk's failures

`run.py` starts lives, one after another in the same directory, until one of them ends well. The trainer and the weights
have no arithmetic at all; what is checked is who is trained when, and by what. Of the core's private names it uses
`Ledger._drop`, by which it hears of dropped groups whatever drops them, and reads `RolloutStage._context` and the
gate's `_live`, `_waiting` and `_queue`, in which a leak shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_runs.history import read_history
from slime_runs.inspect.ledger_verify import verify
from slime_testing_probes.scripted import CharTokenizer

from slime_core import loop
from slime_core.checkpoint.store import read_state
from slime_core.data.prompts import DatasetSource
from slime_core.errors import TrainError
from slime_core.launch.journal import Journal
from slime_core.launch.resume import commit_to_resume, first_rollout, restore
from slime_core.protocols import Args
from slime_core.rollout import ahead
from slime_core.rollout.fate import FilterStage
from slime_core.rollout.pool import generate_rollout
from slime_core.rollout.reward import RewardStage
from slime_core.rollout.stage import RolloutParts, RolloutStage
from slime_core.sample import Group
from tests.simulation import disk
from tests.simulation.check import History
from tests.simulation.engine import SimulatedEngine, SimulatedFilter, SimulatedGenerator, SimulatedReward
from tests.simulation.faults import Faults, Killed
from tests.simulation.loop import SimulatedLoop, SimulationError, VirtualClock
from tests.simulation.settings import SimulationSettings
from tests.simulation.threads import Runner, Threads
from tests.simulation.trainer import (
    AsyncJournal,
    AsyncLearner,
    AsyncWeights,
    SimulatedJournal,
    SimulatedLearner,
    SimulatedWeights,
)


class World:
    """Everything of one life.

    Args:
        seed: Draws the order of tasks, and times.
        settings: Of the run.
        faults: Of the run; goes on counting from life to life.
        history: Of the run.
        clock: Of the run.
        root: The run's directory.
    """

    def __init__(
        self,
        seed: int,
        settings: SimulationSettings,
        faults: Faults,
        history: History,
        clock: VirtualClock,
        root: Path,
    ) -> None:
        self.settings, self.faults, self.history, self.clock, self.root = settings, faults, history, clock, root
        self.rng = random.Random(seed)
        self.dead = False
        self.drained = False
        """Asked to end early."""
        self.unfinished: list[int] = []
        """Evaluations that a commit would miss."""
        self.loop = SimulatedLoop(self.rng, clock)
        self.threads = Threads(self.loop)
        self.args = settings.args(root, load=True)
        self.engine = SimulatedEngine(self.ask, self.rng, settings.rollout_max_response_len + 4)
        self.filter = SimulatedFilter(7, settings.filtered)
        self.stage = self._stage()
        self.learner = SimulatedLearner(self)
        self.weights = SimulatedWeights(self)
        self.journal = self._journal()

    def ask(self, place: str) -> str | None:
        """Count an event; what goes wrong there. Raises Killed when the process ends here."""
        if self.dead:
            return None
        found = self.faults.at(place)
        if found == "kill":
            self.kill(place)
        if found == "term":
            self.history.note("term")
            self.drained = True
            self.stage.interrupt()
            return None
        return found

    def ask_disk(self, what: str) -> str | None:
        """`ask` for a change of the file system; a dead process makes none."""
        if self.dead:
            raise Killed(f"dead before {what}")
        return self.ask("disk")

    def kill(self, where: str) -> None:
        """End the process. Raises Killed."""
        self.dead = True
        self.history.note(f"killed at {where}")
        error = Killed(f"killed at {where}")
        self.loop.kill(error)
        raise error

    # -- parts -----------------------------------------------------------------------------------------

    def _stage(self) -> RolloutStage:
        args, settings = self.args, self.settings
        self.source = source = ObservedSource(args, self.history)
        if settings.mode == "full":
            aside = args.rollout_batch_size if args.dynamic_sampling_on_exhausted == "keep" else 0
            waiting = max(args.async_buffer_groups, args.rollout_batch_size)
            in_training = args.rollout_batch_size
            source.most_held = waiting + args.sglang_server_concurrency + aside + in_training
        reward: Any = SimulatedReward(args, self.ask, self.rng, scores_groups=settings.group_rm)
        shares = {"failing": settings.failing, "fan_out": settings.fan_out, "two_turns": settings.two_turns}
        parts = RolloutParts(
            data_source=source, rollout_function=generate_rollout,
            eval_function=self._evaluate if settings.eval_interval else None, tokenizer=source.tokenizer,
            engine=self.engine,  # type: ignore[arg-type]
            generator=SimulatedGenerator(7, **shares),  # type: ignore[arg-type]
            rewards=RewardStage(args, reward, _no_other),
            filters=FilterStage(args, self.filter if settings.filtered else None, "simulated"),
            resolve_generator=_no_other,
        )  # fmt: skip
        stage = RolloutStage(args, parts, Runner(self.loop, self.threads))
        real = stage.ledger._drop

        def drop(key: int, reason: str) -> None:
            self.history.dropped(key, reason, self.filter.drops(key))
            real(key, reason)

        stage.ledger._drop = drop  # type: ignore[method-assign]
        return stage

    async def _evaluate(
        self, args: Args, rollout_id: int, data_source: Any, evaluation: bool = True, *, context: Any
    ) -> dict[str, Any]:
        """Two groups through the runner that training uses."""
        from slime_core.rollout.generate import train_sampling_params
        from slime_core.sample import Sample

        fault = self.ask("eval")
        self.history.note(f"evaluates {rollout_id}")
        if fault == "crash":
            raise TrainError("the simulated evaluation failed")
        if fault == "slow":
            await asyncio.sleep(60.0)
        version = self.engine.weight_version
        group = [Sample(index=i, group_index=0, tokens=[1, 2], prompt="p", metadata={"eval": 1}) for i in range(2)]
        params = train_sampling_params(args)
        done = await context.runner.run_group(group, params, rollout_id=rollout_id, evaluation=True)
        mixed = sorted({v for s in done for v in s.token_weight_versions} - {version})
        if mixed:
            self.history.violated(
                f"the evaluation of rollout {rollout_id} began with version {version}, and saw {mixed}"
            )
        rewards = [0.0 if s.reward is None else float(s.reward) for s in done]
        return {"held": {"rewards": rewards, "truncated": [False] * len(done), "samples": done}}

    def _journal(self) -> Journal:
        hooks: Any = SimpleNamespace(
            slime_log_metrics=self._see_metrics, slime_step_end=_ignore, slime_save_state=list,
            slime_checkpoint_saved=_ignore, slime_load_state=_ignore,
        )  # fmt: skip
        writers: list[Callable[[Path, int], None]] = [self._save_learner, self.stage.save]
        return Journal(self.args, self.root, hooks, writers, self._facts, [], 0.0)

    def _facts(self) -> dict[str, Any]:
        version = self.weights.version + self.learner.unpushed
        return {"weight_version": version, "settings": {}, "unfinished": list(self.unfinished)}

    def _save_learner(self, directory: Path, rollout_id: int) -> None:
        self.learner.save(directory, rollout_id)

    def _see_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        drawn, back = metrics.get("rollout/groups_drawn"), metrics.get("rollout/groups_given_back")
        if drawn is None or back is None or self.settings.mode != "sync":
            return
        drops = {k.rpartition("drop_")[2]: v for k, v in metrics.items() if "drop_" in k}
        kept = len(set(self.learner.last.group_indices)) if self.learner.last is not None else 0
        exhausted = metrics.get("rollout/dynamic_filter/kept_exhausted", 0)
        if drawn != kept + sum(drops.values()) - drops.get("aborted", 0) - exhausted + back:
            self.history.violated(f"step {step}: the metrics do not add up: {dict(metrics)}")

    # -- running ---------------------------------------------------------------------------------------

    def run(self) -> str:
        """Live: "done", "drained", or "killed"; raises what the run ends with, SlimeError or SimulationError."""
        silent = contextlib.redirect_stdout(io.StringIO())
        with disk.watched(self.root, self.ask_disk), silent:
            try:
                return self._run()
            except Killed:
                return "killed"
            finally:
                self.dead = True
                self.threads.discard()
                self.loop.discard()

    def _run(self) -> str:
        commit = commit_to_resume(self.args)
        start = first_rollout(self.args, commit)
        trainer = None
        if commit is not None:
            trainer = json.loads((commit / "learner.json").read_text())
            state = read_state(commit)
            rollout_id = int(state["rollout_id"])
            self.unfinished += state["unfinished"]
            self.history.began(rollout_id, trainer)
            self._check(commit)
            restore(
                self.args, commit, {}, trainer=self.learner, stage=self.stage, weights=self.weights,
                journal=self.journal,
            )  # fmt: skip
        else:
            self.history.began(None, None)
        done = self._train(start)
        limit = self.args.sglang_server_concurrency
        if self.engine.most_running > limit:
            self.history.violated(f"{self.engine.most_running} requests ran at once; the limit is {limit}")
        commit = commit_to_resume(self.args)
        if commit is not None:
            self._check(commit)
        if done >= self.args.num_rollout and not self.unfinished:
            self.history.check_end(commit)
            return "done"
        if not self.drained:
            raise SimulationError(f"the loop ended after {done} of {self.args.num_rollout} rollouts, unasked")
        return "drained"

    def _train(self, start: int) -> int:
        if self.settings.mode != "sync":
            done = self.loop.run(self._train_async(start))
            self._check_rest()
            return done
        try:
            self.stage.start()
            journal = SimulatedJournal(self)
            stages = loop.Stages(self.stage, self.learner, self.weights, journal, lambda: self.drained, self.unfinished)
            done = loop.now(loop.train(self.args, stages, start))
            self._check_rest()
        finally:
            if not self.dead:
                self.stage.stop()
        return done

    async def _train_async(self, start: int) -> int:
        rollout = ahead.Ahead(self.args, self.stage)
        try:
            await rollout.start()
            stages = loop.Stages(
                rollout, AsyncLearner(self), AsyncWeights(self), AsyncJournal(self), lambda: self.drained,
                self.unfinished,
            )  # fmt: skip
            done = await loop.train(self.args, stages, start)
        finally:
            if not self.dead:
                await rollout.stop()
        return done

    def _check(self, commit: Path) -> None:
        """The commit, as the observer and as `slime ledger verify` see it."""
        self.history.check_commit(commit)
        for problem in verify(read_history(commit)).problems:
            self.history.violated(f"slime ledger verify: {problem}")

    def _check_rest(self) -> None:
        """Nothing goes on, and nobody waits, once the loop has returned."""
        self.loop.run(_turn())
        left = self.loop.describe_tasks()
        if self.engine.running or left != "  no task":
            raise SimulationError(f"the loop has returned, and {len(self.engine.running)} requests run, with\n{left}")
        context: Any = self.stage._context
        gate = context.runner.engine
        if (gate._live, gate._waiting, len(gate._queue)) != (0, 0, 0):
            raise SimulationError(
                f"the gate counts {gate._live} live, {gate._waiting} waiting, {len(gate._queue)} queued"
            )


class ObservedSource(DatasetSource):
    """The real data source, and what it hands out told to the history."""

    def __init__(self, args: Args, history: History) -> None:
        from slime_core.data.buffer import BufferBase

        super().__init__(args, CharTokenizer(), BufferBase(args))
        self._history = history
        self.most_held: int | None = None
        """Groups that may be in flight or wait; None: nobody counts."""

    def state_dict(self) -> dict[str, Any]:
        """The moment that a commit holds."""
        self._history.marked()
        return super().state_dict()

    def get_samples(self, num_samples: int) -> list[Group]:
        """Waiting groups first, then fresh ones."""
        groups = super().get_samples(num_samples)
        self._history.drawn(groups)
        if self.most_held is not None:
            self._history.held(len(self.buffer), self.most_held)
        return groups


async def _turn() -> None:
    """Let what is ready end, and what takes a while to hear that it was cancelled."""
    await asyncio.sleep(10.0)


def _ignore(**_: Any) -> None:
    """A hook."""


def _no_other(spec: str) -> Any:
    raise LookupError(f"a simulated run has no component {spec!r}")
