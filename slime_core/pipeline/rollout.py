"""Stage 2: prompts -> `rollout_batch_size` generated, scored and kept groups.

This is the built-in rollout function (kind `rollouts`, name `generate`). Groups run concurrently; a dropped group is
replaced by exactly one new one, so nothing is drawn without need::

    data source --draw--> in flight --done--> filter --keep--> accepted   (until rollout_batch_size)
         ^                    |                 |drop: draw one more
         |                    |stop (enough accepted)
         +----give back-------+   partial rollout: with their tokens; otherwise as fresh prompts

So no drawn prompt is ever lost: it is accepted, dropped by the filter with a counted reason, or given back.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from slime_core.errors import RolloutError
from slime_core.pipeline.contracts import drawn_groups
from slime_core.pipeline.filters import FilterStage
from slime_core.pipeline.generate import SampleRunner, train_sampling_params
from slime_core.plugins.boundary import user_code
from slime_core.types import Group, RolloutFnEvalOutput, RolloutFnTrainOutput, SampleStatus

logger = logging.getLogger(__name__)

STOP_DEADLINE = 60.0
"""Seconds that aborted samples get to come back."""


@dataclass
class RolloutContext:
    """What a rollout function gets when it declares the keyword `context`."""

    runner: SampleRunner
    filters: FilterStage


@dataclass
class _Wave:
    """The state of one call of `generate_rollout`."""

    args: Any
    rollout_id: int
    source: Any
    context: RolloutContext
    in_flight: dict[asyncio.Task[Group], Group] = field(default_factory=dict)
    accepted: list[Group] = field(default_factory=list)
    surplus: list[Group] = field(default_factory=list)
    drawn: int = 0
    returned: int = 0

    def draw(self, num_groups: int) -> None:
        budget = self.args.dynamic_sampling_budget * self.args.rollout_batch_size
        if self.drawn + num_groups > max(budget, self.args.over_sampling_batch_size):
            raise RolloutError(
                f"rollout {self.rollout_id}: {self.drawn} groups drawn and only {len(self.accepted)} of"
                f" {self.args.rollout_batch_size} kept (not kept: {self.context.filters.take_metrics()}); raise"
                f" --dynamic-sampling-budget (now {self.args.dynamic_sampling_budget}), or see to why groups are"
                " dropped, fail or come back aborted"
            )
        params = train_sampling_params(self.args)
        with user_code("--data-source-path: get_samples"):
            answer = self.source.get_samples(num_groups)
        for group in drawn_groups(answer, num_groups, self.rollout_id, self.drawn):
            run = self.context.runner.run_group(group, params, rollout_id=self.rollout_id)
            self.in_flight[asyncio.create_task(run)] = group
        self.drawn += num_groups

    def take(self, original: Group, group: Group) -> None:
        """Accept, drop or give back one finished group."""
        if len(self.accepted) >= self.args.rollout_batch_size:
            self.surplus.append(original)
            return
        if any(s.status == SampleStatus.ABORTED for s in group):
            self.context.filters.count("aborted")
            self.give_back([original])
            self.refill()
            return
        scored = [s for s in group if s.status != SampleStatus.FAILED]
        if not scored:
            self.context.filters.count("failed")
            self.refill()
            return
        decision = self.context.filters.decide(scored)
        enough = len(self.accepted) + len(self.in_flight) >= self.args.rollout_batch_size
        if decision.keep or (decision.keep_when_insufficient and not enough):
            self.accepted.append(group)
        else:
            self.refill()

    def refill(self) -> None:
        missing = self.args.rollout_batch_size - len(self.accepted) - len(self.in_flight)
        if missing > 0:
            self.draw(missing)

    def give_back(self, groups: list[Group]) -> None:
        """Return groups to the data source, which hands them out first next time."""
        for group in groups:
            for sample in group:
                if self.args.partial_rollout and sample.status != SampleStatus.FAILED:
                    sample.metadata.setdefault("start_rollout_id", self.rollout_id)
                else:
                    sample.reset_for_retry()
        if groups:
            self.source.add_samples(sorted(groups, key=lambda g: g[0].group_index or 0))
            self.returned += len(groups)

    async def run(self) -> None:
        self.draw(max(self.args.over_sampling_batch_size, self.args.rollout_batch_size))
        while len(self.accepted) < self.args.rollout_batch_size:
            # Every task ends by itself: generation and scoring have deadlines of their own.
            done, _ = await asyncio.wait(self.in_flight, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in self.in_flight if task in done]:
                self.take(self.in_flight.pop(task), task.result())

    async def stop(self) -> None:
        """Abort what still runs and give it back."""
        runner, tasks = self.context.runner, list(self.in_flight)
        if tasks:
            runner.stopping = True
            try:
                await runner.engine.abort()
                _, late = await asyncio.wait(tasks, timeout=STOP_DEADLINE)
                for task in late:
                    logger.warning("a group did not stop within %.0f s of the abort; cancelled", STOP_DEADLINE)
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                runner.stopping = False
        self.give_back([*self.surplus, *self.in_flight.values()])
        self.in_flight.clear()


async def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False, *, context: RolloutContext
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generate one rollout. Groups come back ordered by `group_index`, whatever order they finished in.

    Raises:
        RolloutError: The filter's budget ran out, or too many samples failed in a row.
    """
    if evaluation:
        from slime_core.pipeline.evaluate import evaluate_datasets

        return await evaluate_datasets(args, data_source, context.runner, rollout_id)
    wave = _Wave(args, rollout_id, data_source, context)
    try:
        await wave.run()
    finally:
        await wave.stop()
    metrics = {
        **context.filters.take_metrics(),
        "rollout/groups_drawn": float(wave.drawn),
        "rollout/groups_given_back": float(wave.returned),
    }
    return RolloutFnTrainOutput(sorted(wave.accepted, key=lambda g: g[0].group_index or 0), metrics)
