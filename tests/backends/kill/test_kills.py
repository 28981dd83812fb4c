"""Something is killed at every kind of event, then the run is resumed: nothing is lost, nothing trained on twice.

A synchronous run must end with the bytes of the run that nobody killed: weights, optimizer, RNG, data cursor, metrics.
Where what is in flight depends on the clock, or tokens of an interrupted rollout are kept, the ledger must hold and
every step be recorded once. How many points there were of each kind, and their seconds, is shown at the end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.backends.kill.points import EVENTS, kind_of, spread
from tests.backends.kill.runs import Kills
from tests.conftest import MEASURED, TinyRun
from tests.zygote import Zygote

pytestmark = [pytest.mark.backends, pytest.mark.timeout(1200)]
ONE_STEP: dict[str, Any] = {"async": True, "async_mode": "one-step"}
FSDP: dict[str, Any] = {"train_backend": "fsdp"}
FSDP_KINDS = ("train_step", "optimizer", "push", "push_tensor", "save_trainer", "commit_file", "commit_rename")
FULL: dict[str, Any] = {"async": True, "async_mode": "full", "max_staleness": 2}
WHOLE_GROUPS: dict[str, Any] = {"partial_rollout": None, "over_sampling_batch_size": None}
"""What is interrupted is regenerated, and no group more than needed: the clock decides nothing."""
AMID_A_RUN = ("generate", "reward", "filter", "train_step", "push", "eval", "commit", "metrics")


@dataclass(frozen=True)
class Mode:
    """One kind of run, and how many points of it."""

    points: int
    kinds: Sequence[str] = ()
    """Only these; empty for all."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of `Kills`."""
    rank: int | None = None
    """Where there are several: points of this one."""
    least: int = 0
    """Points that are met for sure, where the clock decides whether a run comes to its point. 0: all."""

    def has(self, event: str) -> bool:
        """Whether points may be at this event."""
        if self.rank is not None:
            # Before the ranks know each other, only what started them (`start_ranks`, torchrun) could end the others.
            rank = event.partition("@")[2]
            if rank != (str(self.rank) if self.rank else "") or "_run_dir" in event:
                return False
        return not self.kinds or kind_of(event).partition("@")[0] in self.kinds

    @property
    def sure(self) -> int:
        """Points that every run of this test meets."""
        return self.least or self.points


def timed(points: int, flags: dict[str, Any], rank: int | None = None, **settings: Any) -> Mode:
    """An asynchronous one."""
    return Mode(points, settings={"flags": flags, "bitwise": False, **settings}, rank=rank, least=int(points * 0.8))


MODES = {
    "driver": Mode(104),
    "driver with reward workers": Mode(8, ("reward", "start", "eval"), {"flags": {"rm_workers": 2}}),
    "driver one-step": timed(30, ONE_STEP),
    "driver full": timed(30, FULL),
    "rank 0 of 2": Mode(7, settings={"ranks": 2}, rank=0),
    "rank 1 of 2": Mode(9, settings={"ranks": 2}, rank=1),
    "rank 1 of 2 one-step": timed(5, ONE_STEP, rank=1, ranks=2),
    "rank 0 of 2, fsdp": Mode(12, FSDP_KINDS, {"ranks": 2, "flags": FSDP}, rank=0),
    "rank 1 of 2, fsdp": Mode(7, settings={"ranks": 2, "flags": FSDP}, rank=1),
    "engine": Mode(5, AMID_A_RUN, {"server": True, "how": "engine", "bitwise": False}, least=4),
    "reward worker": Mode(9, AMID_A_RUN, {"flags": {"rm_workers": 2}, "how": "worker", "bitwise": False}, least=8),
    "drain": Mode(12, settings={"flags": WHOLE_GROUPS, "how": "drain"}),
    "drain one-step": timed(6, ONE_STEP, how="drain"),
    "drain full": timed(6, FULL, how="drain"),
    "drain then kill": Mode(8, settings={"how": "drain+12", "bitwise": False}),
    "drain then kill full": timed(6, FULL, how="drain+12"),
}
TWICE = 10
SHARDED = (
    "torch.distributed.checkpoint.filesystem", "torch.distributed.checkpoint.state_dict_loader",
    "torch.distributed.checkpoint.state_dict_saver",
)  # fmt: skip
"""Modules that a commit of an fsdp trainer imports."""


@pytest.fixture(scope="module")
def zygotes() -> Iterator[list[Zygote]]:
    """Two runs at a time."""
    made = [Zygote(("slime_embedded.fsdp.trainer", *SHARDED)) for _ in range(2)]
    yield made
    for zygote in made:
        zygote.close()


def test_there_are_enough_points() -> None:
    assert sum(mode.sure for mode in MODES.values()) >= 200


@pytest.mark.parametrize("name", MODES)
def test_a_kill_at(
    name: str, tiny: TinyRun, tmp_path: Path, zygotes: list[Zygote], record_property: Callable[..., None]
) -> None:
    mode = MODES[name]
    kills = Kills(tiny, tmp_path, zygotes, **mode.settings)
    try:
        events = kills.record()
        points = spread(Counter({event: n for event, n in events.items() if mode.has(event)}), mode.points)
        if name == "driver":
            assert {kind_of(point) for point in points} == {kind_of(event) for event in events} == set(EVENTS)
        kills.check_all([[point] for point in points])
        record_property(MEASURED, kills.summary())
        assert sum(kills.done.values()) >= mode.sure
    finally:
        kills.close()


def test_two_kills_one_after_the_other(
    tiny: TinyRun, tmp_path: Path, zygotes: list[Zygote], record_property: Callable[..., None]
) -> None:
    """The second one hits the run that resumes, its restoring included."""
    kills = Kills(tiny, tmp_path, zygotes)
    points = spread(kills.record(), 200)
    rng = random.Random(7)
    pairs = [[rng.choice(points), rng.choice(points)] for _ in range(TWICE)]
    kills.check_all([*pairs, ["step_end.step_end:end#2", "start.restore:begin#1"], ["eval.evaluate:begin#3"] * 2])
    record_property(MEASURED, kills.summary())
    assert sum(kills.done.values()) > TWICE + 2
