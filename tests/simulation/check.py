"""What an observer outside of the simulated run has seen, and the promises it holds the run to.

`world.py` tells the `History` everything that happens, in all lives of the run; a resume takes back what came after its
commit. Nothing here asks the code under test: groups are counted where they are drawn, trained, dropped and stored. A
group that was trained by a life that died before its commit was not trained at all.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from slime_core.data.ledger import LEFT_OUT, REMOVED
from slime_core.data.prompts import epoch_order
from slime_core.rollout.state import OPEN_GROUPS_FILE, from_line
from slime_core.sample import NOT_SAMPLED, Group, TrainBatch
from tests.simulation.engine import SimulatedFilter
from tests.simulation.settings import SimulationSettings


@dataclass(frozen=True)
class Mark:
    """How much had happened when a commit's state was taken."""

    events: int
    checksum: int


@dataclass
class History:
    """Of one run. `violations` are the broken promises, in order of being noticed."""

    settings: SimulationSettings
    violations: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    """Everything, in order, lives that died included: equal for equal seeds."""
    lives: int = 0
    batches: dict[int, str] = field(default_factory=dict)
    """Rollout -> digest of what was trained last under that number."""
    _rows: dict[int, int] = field(default_factory=dict)
    """Group -> row, over all lives."""
    _events: list[tuple[str, Any]] = field(default_factory=list)
    """What counts: what came before the commit that the present life began with, and its own."""
    _marks: dict[int, Mark] = field(default_factory=dict)
    """Number of a commit -> what had happened."""
    _saves: int = 0
    _checksum: int = 0
    """Of everything the trainer has been given."""

    def note(self, text: str) -> None:
        """Add to the trace."""
        self.trace.append(text)

    def violated(self, promise: str) -> None:
        """Note a broken promise once."""
        if promise not in self.violations:
            self.violations.append(promise)
            self.note(f"VIOLATION {promise}")

    # -- what happens ----------------------------------------------------------------------------------

    def drawn(self, groups: Iterable[Group]) -> None:
        """The data source has handed out groups."""
        for group in groups:
            number, row = group[0].group_index, group[0].row
            if number is None or row is None:
                self.violated(f"a group without a number or a row was drawn: {number}, {row}")
                continue
            self.note(f"drawn {number}")
            expected = self._expected_row(number)
            if self._rows.setdefault(number, row) != row or row != expected:
                self.violated(f"group {number} is of row {row}, and should be of row {expected}")
            if number not in self.numbers("drawn"):
                self._events.append(("drawn", number))
            for name in ("trained", "dropped"):
                if number in self.numbers(name):
                    self.violated(f"group {number} was drawn again after it was {name}")

    def trained(self, batch: TrainBatch, rollout_id: int) -> None:
        """The trainer has made its steps."""
        counts = Counter(batch.group_indices)
        self.note(f"trained {rollout_id} {sorted(counts)} v{batch.weight_version}")
        done = self.numbers("rollout")
        if rollout_id != (max(done) + 1 if done else 0) or batch.rollout_id != rollout_id:
            self.violated(f"rollout {rollout_id} was trained after {done[-1] if done else 'nothing'}")
        self._events.append(("rollout", rollout_id))
        for number in counts:
            if number in self.numbers("trained"):
                self.violated(f"group {number} was trained twice")
            if number not in self.numbers("drawn"):
                self.violated(f"group {number} was trained and never drawn")
            self._events.append(("trained", number))
        self._checksum = hash((self._checksum, rollout_id, *sorted(counts.items())))
        content = repr(
            (batch.tokens, batch.rewards, batch.loss_masks, batch.token_weight_versions, batch.weight_version)
        )
        self.batches[rollout_id] = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
        self._check_size(counts, rollout_id)
        self._check_versions(batch, rollout_id)

    def dropped(self, number: int, reason: str, filtered: bool) -> None:
        """The rollout will not use the group; `filtered`: the dynamic filter drops it."""
        self.note(f"dropped {number} {reason}")
        if number in self.numbers("trained"):
            self.violated(f"group {number} was dropped ({reason}) after it was trained")
        if reason in (LEFT_OUT, REMOVED) or (reason == SimulatedFilter.REASON and not filtered):
            self.violated(f"group {number} got lost: {reason}")
        self._events.append(("dropped", number))

    def pushed(self, version: int, before: int) -> None:
        """The engine serves a version, after that of `before`."""
        self.note(f"pushed {version}")
        if version < before:
            self.violated(f"weight version {version} was served after {before}")
        served = dict(found for name, found in self._events if name == "pushed")
        if served.setdefault(version, self._checksum) != self._checksum:
            self.violated(f"weight version {version} was served twice, as other weights")
        self._events.append(("pushed", (version, self._checksum)))

    def held(self, in_buffer: int, most: int) -> None:
        """So many groups may be in flight or wait at most, beside those in the buffer."""
        gone = len(self.numbers("trained")) + len(set(self.numbers("dropped")))
        held = len(self.numbers("drawn")) - gone - in_buffer
        if held > most:
            self.violated(f"{held} groups are in flight or wait for the trainer; the most that may is {most}")

    def committing(self, rollout_id: int) -> dict[str, int]:
        """What the trainer must save in a commit that is being made: made twice, a rollout's commit is another one."""
        self._saves += 1
        return {"rollout_id": rollout_id, "checksum": self._checksum, "number": self._saves}

    def marked(self) -> None:
        """The commit that is being made takes its state now."""
        self.note(f"commit {self._saves}")
        self._marks[self._saves] = Mark(len(self._events), self._checksum)

    def began(self, rollout_id: int | None, trainer: Mapping[str, Any] | None) -> None:
        """A life begins with the commit of that rollout and this trainer, or with nothing."""
        self.lives += 1
        self.note(f"life {self.lives} from {rollout_id}")
        mark = Mark(0, 0) if trainer is None else self._marks.get(trainer["number"])
        if mark is None:
            self.violated(f"resumed from a commit of rollout {rollout_id}, which nobody made")
            return
        del self._events[mark.events :]
        self._checksum = mark.checksum
        if trainer is not None and (trainer["rollout_id"], trainer["checksum"]) != (rollout_id, mark.checksum):
            self.violated(f"the trainer of commit {rollout_id} is not the one that was saved: {trainer}")

    def numbers(self, name: str) -> list[int]:
        """Groups (or rollouts) of the events of that name that count, in order."""
        return _numbers(self._events, name)

    # -- promises --------------------------------------------------------------------------------------

    def check_commit(self, commit: Path) -> None:
        """Every prompt drawn before it is trained, dropped or stored in it, once; none was skipped."""
        mark = self._marks[json.loads((commit / "learner.json").read_bytes())["number"]]
        before = self._events[: mark.events]
        source = json.loads((commit / "data_source.json").read_bytes())["data_source"]
        stored = [g[0]["group_index"] for g in source["buffer"]["state"]["groups"]]
        ahead = _open_groups(commit)
        ledger = {int(e["group"]): e["state"] for e in json.loads((commit / "ledger.json").read_bytes())["open"]}
        where = f"commit {commit.name}"
        drawn, trained = _numbers(before, "drawn"), set(_numbers(before, "trained"))
        if sorted(drawn) != list(range(source["next_group_index"])):
            self.violated(f"{where}: its cursor says {source['next_group_index']} groups, {len(drawn)} were drawn")
        for name, numbers in (("buffer", stored), ("open groups", ahead)):
            twice = [n for n, count in Counter(numbers).items() if count > 1]
            if twice:
                self.violated(f"{where}: groups {twice} are in its {name} twice")
            both = sorted(trained & set(numbers))
            if both:
                self.violated(f"{where}: groups {both} are trained, and in its {name} to be trained again")
        if set(ledger) != {*stored, *ahead}:
            self.violated(f"{where}: its ledger says {ledger} are open; it holds {stored} waiting and {ahead} ahead")
        dropped = set(_numbers(before, "dropped")) - set(stored) - set(ahead)
        lost = sorted(set(drawn) - trained - dropped - set(stored) - set(ahead))
        if lost:
            self.violated(f"{where}: groups {lost} are lost: neither trained nor dropped nor in the commit")

    def check_end(self, commit: Path | None) -> None:
        """The run says it is done."""
        rollouts = list(range(self.settings.num_rollout))
        if self.numbers("rollout") != rollouts:
            self.violated(f"the run is done, and was trained on rollouts {self.numbers('rollout')}")
        if commit is None or f"{rollouts[-1]:07d}" not in commit.name:
            self.violated(f"the run is done, and its last commit is {commit}")

    def _check_size(self, counts: Counter[int], rollout_id: int) -> None:
        settings = self.settings
        wanted, size = settings.rollout_batch_size, settings.n_samples_per_prompt
        shrinks = settings.dynamic_sampling_on_exhausted == "shrink"
        if len(counts) != wanted and not (shrinks and 0 < len(counts) < wanted):
            self.violated(f"rollout {rollout_id} has {len(counts)} groups, and should have {wanted}")
        for number, count in counts.items():
            if count != size and not (settings.fan_out and count > size):
                self.violated(f"group {number} was trained with {count} samples, and should have {size}")

    def _check_versions(self, batch: TrainBatch, rollout_id: int) -> None:
        oldest_allowed = self._oldest(batch.weight_version)
        columns = batch.token_weight_versions or [[batch.weight_version] * len(mask) for mask in batch.loss_masks]
        for versions, mask, number in zip(columns, batch.loss_masks, batch.group_indices, strict=True):
            sampled = [v for v in versions if v != NOT_SAMPLED]
            if any(late < early for early, late in pairwise(sampled)):
                self.violated(f"a sample of group {number} has tokens of versions {sampled}, newer before older")
            if any(v > batch.weight_version for v in sampled):
                self.violated(f"group {number} has tokens of versions after {batch.weight_version}, which trains them")
            trained = [v for v, m in zip(versions, mask) if m and v != NOT_SAMPLED]
            if oldest_allowed is not None and trained and min(trained) < oldest_allowed:
                self.violated(
                    f"rollout {rollout_id}: group {number} has tokens of version {min(trained)}; the oldest that"
                    f" {batch.weight_version} may train on is {oldest_allowed}"
                )

    def _oldest(self, version: int) -> int | None:
        settings = self.settings
        if settings.mode == "sync":
            return None if settings.partial_rollout else version
        bound = settings.max_staleness
        return None if bound is None else version - bound

    def _expected_row(self, number: int) -> int:
        rows = self.settings.num_rows
        epoch, offset = divmod(number, rows)
        return int(epoch_order(rows, 42, epoch)[offset]) if self.settings.rollout_shuffle else offset


def _numbers(events: Iterable[tuple[str, Any]], name: str) -> list[int]:
    return [number for found, number in events if found == name]


def _open_groups(commit: Path) -> list[int]:
    """Groups that a commit holds beside its buffer: ready to be trained on, or in flight."""
    path = commit / OPEN_GROUPS_FILE
    if not path.is_file():
        return []
    return [from_line(json.loads(line))[1].group_index or 0 for line in path.read_bytes().splitlines()]
