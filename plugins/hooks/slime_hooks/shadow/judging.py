"""Copies of a rollout's groups -> what shadow rewards pay and shadow filters decide, in a thread with its own loop."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from slime_runs.files import FOLDER, Row, json_lines, shadow_name, write_file

from slime_core.distributions import provided
from slime_core.plugins.adapters import RewardCaller, Workers
from slime_core.plugins.resolve import resolve
from slime_core.protocols import Args
from slime_core.rollout.fate import FilterStage
from slime_core.sample import Group, Sample, SampleStatus

logger = logging.getLogger(__name__)

_SCORED = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)


class Seen(NamedTuple):
    """A group as a shadow may see it: copies."""

    samples: Group
    kept: bool
    """By the run's own filter."""


class Judge:
    """The shadow components of one process; one thread calls `rollout`."""

    def __init__(self, args: Args) -> None:
        self._args = args
        make = provided("slime.api", "reward_processes")
        self._workers: Workers = make(args, 1, memory_limit=args.rm_memory_limit)
        self._rewards = [
            RewardCaller(
                resolve("rewards", spec, origin="--shadow-rm-path"), args, workers=lambda: self._workers, spec=spec,
                group=args.group_rm,
            )
            for spec in args.shadow_rm_path
        ]  # fmt: skip
        self._filters = {
            spec: FilterStage(args, resolve("filters", spec, origin="--shadow-filter-path").obj, spec)
            for spec in args.shadow_filter_path
        }
        self._told: set[str] = set()
        self._loop = asyncio.new_event_loop()

    def rollout(self, run_dir: Path, rollout_id: int, groups: Sequence[Seen]) -> None:
        """Judge one rollout and write its file. What goes wrong is a warning."""
        try:
            rows = self._loop.run_until_complete(self._judge(groups))
            write_file(run_dir / FOLDER / shadow_name(rollout_id), map(json_lines, rows))
        except Exception as error:  # the run goes on without
            self._tell("shadow components", error)

    def close(self) -> None:
        """End the processes; a call that goes on is ended with them."""
        self._workers.close()

    async def _judge(self, groups: Sequence[Seen]) -> list[list[Row]]:
        verdicts = [
            {spec: self._keeps(spec, stage, group) for spec, stage in self._filters.items()} for group in groups
        ]
        rows = [
            [
                {
                    "index": sample.index, "group_index": sample.group_index, "kept": group.kept,
                    "score": sample.finite_reward(self._args), "filters": verdict, "rewards": {}, "seconds": {},
                }
                for sample in group.samples
            ]
            for group, verdict in zip(groups, verdicts)
        ]  # fmt: skip
        for reward in self._rewards:
            await self._score(reward, groups, rows)
        return rows

    async def _score(self, reward: RewardCaller, groups: Sequence[Seen], rows: Sequence[Sequence[Row]]) -> None:
        """Have one reward pay copies of its own."""
        await reward.start()
        calls: list[list[tuple[Sample, Row]]] = []
        for group, of_group in zip(groups, rows):
            able = [(_unpaid(s), row) for s, row in zip(group.samples, of_group) if s.status in _SCORED]
            calls += [able] if reward.batched and able else [[one] for one in able]
        began = time.perf_counter()
        paid = sum(await asyncio.gather(*(self._pay(reward, call) for call in calls)))
        seconds = round((time.perf_counter() - began) / max(paid, 1), 9)
        for row in (row for of_group in rows for row in of_group):
            if reward.spec in row["rewards"]:
                row["seconds"][reward.spec] = seconds

    async def _pay(self, reward: RewardCaller, call: Sequence[tuple[Sample, Row]]) -> int:
        """How many were paid."""
        try:
            paid = await reward.score([sample for sample, _ in call], False)
        except Exception as error:
            self._tell(f"--shadow-rm-path {reward.spec!r}", error)
            return 0
        for (sample, row), value in zip(call, paid):
            sample.reward = dict(value) if isinstance(value, Mapping) else value
            row["rewards"][reward.spec] = sample.finite_reward(self._args)
        return len(call)

    def _keeps(self, spec: str, stage: FilterStage, group: Seen) -> bool | None:
        try:
            return stage.decide(copy.deepcopy(group.samples)).keep
        except Exception as error:
            self._tell(f"--shadow-filter-path {spec!r}", error)
            return None

    def _tell(self, what: str, error: Exception) -> None:
        """Once for each component and kind of error."""
        kind = f"{what}: {type(error).__name__}"
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("%s: %s", kind, " ".join(str(error).split())[:300])


def _unpaid(sample: Sample) -> Sample:
    copied = copy.deepcopy(sample)
    copied.reward = None
    return copied
