"""The Ray launcher: settings -> a finished run whose stages live in actors.

The driver does what the inline launcher's rank 0 does, checks, run directory, resume, loop, journal, hooks, over
stand-ins for the stages; `launch.drive.drive` is the same for both, and so are the commits (`driver.py`). Nothing of
the cluster is touched before every setting has been resolved and tried.
"""

from __future__ import annotations

import time
from typing import Any

from slime_core.config import Settings
from slime_core.launch.lock import sole_writer
from slime_core.launch.prepare import prepare, run_preflight
from slime_core.waits import published
from slime_launcher_ray.carried import carrying
from slime_launcher_ray.driver import run_on_cluster
from slime_launcher_ray.session import connected, joins_another


def train(settings: Settings) -> dict[str, Any]:
    """`slime train` and `slime sft` on a Ray cluster: returns the summary.

    Raises:
        ConfigError: A setting is wrong, or the cluster cannot be joined, has no place for the run, or has other code.
        SlimeError: What a stage raises, wherever it lives.
    """
    started, args = time.perf_counter(), settings.args
    run = prepare(settings)
    if args.preflight:
        run_preflight(run)
    with (
        sole_writer(args),
        published(args, "driver"),
        carrying(args, joins_another(args)) as (carried, package),
        connected(args, package),
    ):
        return run_on_cluster(run, carried, started)
