"""Reader of run directories, for programs and notebooks: `Run(path)`.

>>> from slime_runs import Run                                                                      # doctest: +SKIP
>>> from slime_runs.index import Filter                                                             # doctest: +SKIP
>>> run = Run("outputs/demo")                                                                       # doctest: +SKIP
>>> [sample.text for sample in run.samples(Filter(rollout=3), order="best", limit=2)]               # doctest: +SKIP
"""

from __future__ import annotations

from slime_runs.run import Run, RunError, StoredSample, find_runs

__all__ = ["Run", "RunError", "StoredSample", "find_runs"]
