"""Run code of users in Python processes of their own, which are killed when a call overruns its deadline.

worker.py      `Worker`, a guarded process that answers requests; rewards and environments run in such
messages.py    settings and samples on their way there and back
pool.py        the processes of a run's plain rewards (entry point `reward_processes` of `slime.api`)
scoring.py     the main loop of such a process
"""

__all__: list[str] = []
