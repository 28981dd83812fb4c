"""TensorBoard event files, where tensorboard is installed (`pip install 'slime-rl[tensorboard]'`).

Written here record by record, and not by its `SummaryWriter`, whose thread dies with a traceback on a full disk.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core import Args, hookimpl
from slime_core.errors import ConfigError


def _installed() -> bool:
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        return False
    return True


class TensorBoardTracker:
    """Writes every metric as a scalar."""

    def __init__(self) -> None:
        self._writer: Any = None

    @hookimpl
    def slime_configure(self, args: Args) -> None:
        """Fail at start-up when the package is missing and was asked for."""
        if args.use_tensorboard and not _installed():
            raise ConfigError("--use-tensorboard needs tensorboard: pip install 'slime-rl[tensorboard]'")

    @hookimpl
    def slime_run_start(self, args: Args, run_dir: Path) -> None:
        """Open the file, below `TENSORBOARD_DIR` or in `tensorboard/` of the run directory."""
        wanted = args.use_tensorboard
        if not (_installed() if wanted is None else wanted):
            return
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        root = Path(os.environ.get("TENSORBOARD_DIR", run_dir / "tensorboard"))
        directory = root.joinpath(*(part for part in (args.tb_project_name, args.tb_experiment_name) if part))
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter(open(directory / name, "wb", buffering=0))  # noqa: SIM115  # closed at the end
        first = (args.start_rollout_id or 0) + 1
        self._write(step=first, file_version="brain.Event:2")
        self._write(
            step=first, session_log=SessionLog(status=SessionLog.START)
        )  # what an earlier part had from here goes

    @hookimpl(trylast=True)  # the run's own record says first what is wrong with its directory
    def slime_log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the scalars."""
        if self._writer is not None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
            self._write(step=step, summary=Summary(value=values))

    @hookimpl
    def slime_run_end(self, error: BaseException | None) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=time.time(), **content).SerializeToString())
        self._writer.flush()
