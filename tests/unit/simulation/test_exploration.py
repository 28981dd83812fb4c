"""The control plane keeps its promises in every seed; more of them under the marker `slow`."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.simulation import Fault, SimulationSettings, explore, simulate
from tests.simulation.__main__ import main
from tests.simulation.faults import KINDS

MODES = ("sync", "one-step", "full")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seeds", [range(16), pytest.param(range(16, 200), marks=pytest.mark.slow)], ids=str)
def test_every_seed_keeps_every_promise(mode: str, seeds: range) -> None:
    failed = [str(report) for report in explore(seeds, mode=mode) if not report.ok]
    assert not failed, "\n".join(failed)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_equal_seeds_are_equal_runs(mode: str) -> None:
    first, second = (list(explore(range(7), mode=mode)) for _ in range(2))
    assert [r.digest for r in first] == [r.digest for r in second]
    assert len({r.digest for r in first}) == 7


@pytest.mark.slow
def test_the_seeds_are_of_all_kinds() -> None:
    reports = list(explore(range(200, 250)))
    struck = {fault.place for report in reports for fault in report.struck}
    assert struck == set(KINDS)
    assert {"done", "killed", "drained"} <= {ending for report in reports for ending in report.endings}
    assert sum(report.lives > 1 for report in reports) > 10
    assert sum(not report.struck for report in reports) > 10


def test_the_command_replays_one_seed_and_counts_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "4", "--trace"]) == 0
    shown = capsys.readouterr().out
    report = simulate(4)
    assert shown == "\n".join(report.trace) + f"\n{report}\n"
    assert main(["--seed", "4", "--count", "3"]) == 0
    assert "3 seeds of mode sync: 0 failed" in capsys.readouterr().out
    assert main(["--seed", "4", "--faults", "train[0]=crash"]) == 0
    assert "TrainError" in capsys.readouterr().out


@pytest.mark.slow
def test_a_killed_run_is_trained_on_what_an_unkilled_one_is() -> None:
    """With no more groups drawn than needed, nothing depends on who is first, so a kill may not change anything."""
    compared = 0
    for seed in range(25):
        rng = random.Random(seed)
        settings = SimulationSettings.drawn(rng)
        settings = replace(settings, over_sampling_batch_size=settings.rollout_batch_size, group_timeout=None)
        kills = [Fault("driver", rng.randrange(120), "kill"), Fault("disk", rng.randrange(40), "kill")]
        killed, unkilled = simulate(seed, settings, kills), simulate(seed, settings, [])
        assert killed.ok, killed
        assert unkilled.ok, unkilled
        assert killed.batches == unkilled.batches, killed
        compared += "killed" in killed.endings
    assert compared > 15
