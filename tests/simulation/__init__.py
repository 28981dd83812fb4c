"""Deterministic simulation of the control plane: thousands of interleavings and faults under a virtual clock.

    from tests.simulation import simulate

    report = simulate(7)            # settings, order of tasks and faults are drawn from the seed
    assert report.ok, report        # what was broken, and the command that replays it

Read `world.py` first. `loop.py` is the clock, `faults.py` what goes wrong, `engine.py` and `disk.py` are what is
simulated, `check.py` holds the promises, `run.py` goes through lives and seeds. No torch.
"""

from tests.simulation.check import History
from tests.simulation.faults import Fault, Faults
from tests.simulation.loop import Deadlock, Endless, SimulatedLoop, SimulationError, VirtualClock
from tests.simulation.run import Report, explore, shrink, simulate
from tests.simulation.settings import SimulationSettings
from tests.simulation.world import World

__all__ = [
    "Deadlock",
    "Endless",
    "Fault",
    "Faults",
    "History",
    "Report",
    "SimulatedLoop",
    "SimulationError",
    "SimulationSettings",
    "VirtualClock",
    "World",
    "explore",
    "shrink",
    "simulate",
]
