"""The run directory of a command that trains nothing: never one with a training run's records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slime_core.checkpoint.run_dir import CHECKPOINTS, run_dir_of
from slime_core.checkpoint.run_dir import FILE as METRICS
from slime_core.errors import ConfigError
from slime_core.launch.lock import sole_writer
from slime_core.protocols import Args
from slime_core.waits import published


@contextmanager
def own_directory(args: Args, command: str) -> Iterator[None]:
    """Hold the run directory for a command, and publish its waits there.

    Raises:
        ConfigError: It holds a training run, or another process writes there.
    """
    run_dir = run_dir_of(args)
    of_training = [name for name in (METRICS, CHECKPOINTS) if (run_dir / name).exists()]
    if of_training:
        raise ConfigError(
            f"{run_dir} holds a training run ({', '.join(of_training)}), and slime {command} writes nothing into one;"
            " choose another --run-dir"
        )
    with sole_writer(args), published(args, command):
        yield
