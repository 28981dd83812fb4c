"""TensorBoard event files, where tensorboard is installed (`pip install 'slime-rl[tensorboard]'`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError
from slime_core.plugins.hookspecs import hookimpl


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
    def slime_configure(self, args: Any) -> None:
        """Fail at start-up when the package is missing and was asked for."""
        if args.use_tensorboard and not _installed():
            raise ConfigError("--use-tensorboard needs tensorboard: pip install 'slime-rl[tensorboard]'")

    @hookimpl
    def slime_run_start(self, args: Any, run_dir: Path) -> None:
        """Open the writer: `TENSORBOARD_DIR`, or `tensorboard/` in the run directory."""
        wanted = args.use_tensorboard
        if not (_installed() if wanted is None else wanted):
            return
        from torch.utils.tensorboard import SummaryWriter

        root = Path(os.environ.get("TENSORBOARD_DIR", run_dir / "tensorboard"))
        parts = [part for part in (args.tb_project_name, args.tb_experiment_name) if part]
        self._writer = SummaryWriter(str(root.joinpath(*parts)), purge_step=(args.start_rollout_id or 0) + 1)

    @hookimpl(trylast=True)  # the run's own record says first what is wrong with its directory
    def slime_log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the scalars."""
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)

    @hookimpl
    def slime_run_end(self, error: BaseException | None) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
