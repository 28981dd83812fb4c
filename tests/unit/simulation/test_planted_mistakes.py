"""The simulation finds mistakes that are planted in the code under test, within a few seeds each, and shrinks them."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.simulation import Fault, Report, World, explore, shrink, simulate
from tests.simulation.settings import SimulationSettings

SEEDS = range(60)


def _found(world: type[World], mode: str = "sync") -> Report:
    report = next((r for r in explore(SEEDS, mode=mode, world=world) if not r.ok), None)
    assert report is not None, f"not found in {len(SEEDS)} seeds"
    return report


class LosesGroups(World):
    """One of the groups that are given back together is forgotten."""

    def _stage(self) -> Any:
        stage = super()._stage()
        add = stage.parts.data_source.add_samples
        stage.parts.data_source.add_samples = lambda groups: add(groups[:-1] if len(groups) > 1 else groups)
        return stage


class TrainsTwice(World):
    """A group that was trained on is drawn again, once."""

    def _stage(self) -> Any:
        stage = super()._stage()
        source, draw = stage.parts.data_source, stage.parts.data_source.get_samples
        kept: list[Any] = []

        def get_samples(num_samples: int) -> list[Any]:
            if kept and source.cursor["next_group_index"] > 2:
                return [*draw(num_samples - 1), kept.pop()]
            groups = draw(num_samples)
            kept[:] = kept or copy.deepcopy(groups[:1])
            return groups

        source.get_samples = get_samples
        return stage


class ServesOldWeights(World):
    """The engine keeps what it has when the third version comes."""

    def _stage(self) -> Any:
        stage = super()._stage()
        update = self.engine.update_weights_from_tensor

        async def forgetful(weights: Any, version: int) -> None:
            if version != 3:
                await update(weights, version)

        self.engine.update_weights_from_tensor = forgetful  # type: ignore[method-assign]
        return stage


class WaitsForEver(World):
    """A reward waits for something that does not come, and nobody watches the time."""

    def _stage(self) -> Any:
        stage = super()._stage()
        scorer: Any = stage.parts.rewards.default  # type: ignore[union-attr]
        score = scorer.score

        async def stuck(samples: Any, evaluation: bool) -> Any:
            if samples[0].index == 3:
                await asyncio.Event().wait()
            return await score(samples, evaluation)

        scorer.score = stuck
        return stage


class LeaksTasks(World):
    """Somebody goes on waiting after the loop has returned."""

    def _stage(self) -> Any:
        stage = super()._stage()
        abort = self.engine.abort
        self.leaked: list[Any] = []

        async def leaky(rid: str | None = None) -> None:
            self.leaked.append(asyncio.create_task(asyncio.Event().wait(), name="leaked"))
            await abort(rid)

        self.engine.abort = leaky  # type: ignore[method-assign]
        return stage


class SavesOldCursor(World):
    """Every commit holds the data cursor of the first one."""

    def _journal(self) -> Any:
        journal = super()._journal()
        save, first = self.stage.save, self.root / "first.json"

        def stale(directory: Path, rollout_id: int) -> None:
            save(directory, rollout_id)
            if first.exists():
                shutil.copyfile(first, directory / "data_source.json")
            else:
                shutil.copyfile(directory / "data_source.json", first)

        journal.writers = [self._save_learner, stale]
        return journal


class MixesCommits(World):
    """A commit after the first holds a trainer of the first."""

    def _save_learner(self, directory: Path, rollout_id: int) -> None:
        super()._save_learner(directory, rollout_id)
        if rollout_id > 0:
            state = json.loads((directory / "learner.json").read_text())
            (directory / "learner.json").write_text(json.dumps({**state, "rollout_id": 0}))


class IgnoresAge(World):
    """Nobody looks at `--max-staleness`."""

    def _stage(self) -> Any:
        self.args.max_staleness = None
        return super()._stage()


class FillsTheBuffer(World):
    """Generation goes on long after enough groups wait."""

    def _stage(self) -> Any:
        stage = super()._stage()
        self.args.async_buffer_groups = 1000
        return stage


@pytest.mark.parametrize(
    ("world", "promise"),
    [
        (LosesGroups, "lost|were drawn|are open"),
        (TrainsTwice, "drawn (again )?after it was|trained twice"),
        (ServesOldWeights, "has tokens of version|was served after"),
        (WaitsForEver, "waits for ever|ended without a fault|still running"),
        (LeaksTasks, "the loop has returned(.|\n)*leaked: Event.wait"),
        (SavesOldCursor, "its cursor says|its ledger says|should be of row"),
        (MixesCommits, "is not the one that was saved"),
    ],
)
def test_a_planted_mistake_is_found(world: type[World], promise: str) -> None:
    report = _found(world)
    assert re.search(promise, "\n".join(report.violations)), report
    assert f"--seed {report.seed} --mode sync" in str(report)
    again = simulate(report.seed, world=world)
    assert (again.digest, again.violations) == (report.digest, report.violations)


def test_a_mistake_planted_in_full_asynchrony_is_found() -> None:
    report = _found(IgnoresAge, "full")
    assert re.search("the oldest that", "\n".join(report.violations)), report


def test_a_buffer_that_grows_without_bound_is_found() -> None:
    settings = SimulationSettings(
        mode="full", num_rollout=12, rollout_batch_size=1, n_samples_per_prompt=1, train_seconds=5.0,
        async_buffer_groups=1, sglang_server_concurrency=1,
    )  # fmt: skip
    assert simulate(1, settings, []).ok
    report = simulate(1, settings, [], world=FillsTheBuffer)
    assert re.search("groups are in flight or wait for the trainer; the most that may is 4", str(report)), report


class BreaksAtTheDisk(World):
    """A failed save is taken for a made one."""

    def ask_disk(self, what: str) -> str | None:
        found = super().ask_disk(what)
        if found == "denied":
            self.history.violated("planted")
        return found


def test_a_failing_schedule_is_shrunk_to_what_it_needs() -> None:
    settings = SimulationSettings()
    schedule = [
        Fault("engine", 1, "slow"), Fault("disk", 3, "denied"), Fault("train", 0, "slow"), Fault("reward", 2, "late"),
    ]  # fmt: skip
    report = simulate(5, settings, schedule, world=BreaksAtTheDisk)
    assert report.violations == ["planted"]
    assert shrink(report, world=BreaksAtTheDisk).faults == (Fault("disk", 3, "denied"),)
