"""Environments as generators drive them: found by name, called under deadlines, closed however a sample ends.

    session = await EnvironmentSession.open(args, sample)        session.py: one environment of one sample
    first = await session.reset(sample)
    step = await session.step("east", turn)
    await session.close()

`dialogue.py` turns what they say into ids. `places.py` is where an environment runs: in the event loop, in a thread of
its own, or in a process of its own, which `child.py` serves. `multi_turn` is the generator that plays; what
an environment is says `slime_core/protocols/environment.py`.
"""

from slime_environments.session.dialogue import Dialogue
from slime_environments.session.session import EnvironmentSession

__all__ = ["Dialogue", "EnvironmentSession"]
