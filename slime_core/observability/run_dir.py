"""The run directory: `config.yaml`, `summary.json`, and the rule for starting over in a used one."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.distributions import BUNDLE, CORE, installed
from slime_core.errors import ConfigError, RecordError
from slime_core.protocols import Args

CONFIG, SUMMARY, CHECKPOINTS = "config.yaml", "summary.json", "checkpoints"
OUTPUT = ("actors", "engines", "stalls")
"""Folders of what processes of the run say, which is there before any record is."""
_OURS = (
    CONFIG, SUMMARY, "metrics.jsonl", CHECKPOINTS, "tensorboard", "weights", "local_weights", "rollouts",
    "eval.json", "failures", "samples", "events.jsonl", "incidents.jsonl", "trace.jsonl", "profile", *OUTPUT,
)  # fmt: skip


def run_dir_of(args: Args) -> Path:
    """The run's directory, which the settings' rules have filled in."""
    assert args.run_dir, "every command that writes has a run directory"
    return Path(args.run_dir)


def check_run_dir(run_dir: Path, save: str | None = None, *, resume: bool, overwrite: bool) -> list[Path]:
    """What of another run is there. Raises ConfigError unless it may be continued or overwritten.

    Args:
        run_dir: Where records go.
        save: Where commits go, if elsewhere.
        resume: This is the run whose records are there.
        overwrite: Nobody wants them any more.
    """
    ours = {run_dir / name: name for name in _OURS} | {Path(save or run_dir) / CHECKPOINTS: CHECKPOINTS}
    used = [path for path in ours if path.exists()]
    if used and not (resume or overwrite):
        commits = Path(save or run_dir) / CHECKPOINTS
        go_on = f"Continue it with --load {commits.parent}," if commits in used else "No checkpoint is there to load:"
        raise ConfigError(
            f"{used[0].parent} already holds a run ({', '.join(ours[path] for path in used)}). {go_on}"
            " start over with --overwrite, or choose another --save"
        )
    return used


def open_run_dir(run_dir: Path, save: str | None = None, *, resume: bool, overwrite: bool) -> None:
    """Create the directory, after clearing it of another run that may be overwritten; arguments as above.

    Raises:
        ConfigError: It holds a run that must not be touched, or cannot be written.
    """
    used = check_run_dir(run_dir, save, resume=resume, overwrite=overwrite)
    try:
        # A summary speaks of a finished run, so the one of an earlier part goes when the run goes on.
        for path in {run_dir / SUMMARY} & {*used} if resume else used:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write the run directory {run_dir}: {error}") from error


def write_text(path: Path, text: str) -> None:
    """Replace the file, complete or not at all. Raises RecordError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error}. Checkpoints are intact") from error


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json`."""
    write_text(run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")


def versions() -> dict[str, str]:
    """Versions of what results depend on."""
    import torch
    import transformers

    from slime_core import __version__

    bundle = installed(BUNDLE)
    return {
        CORE: __version__,
        **({BUNDLE: bundle.version} if bundle else {}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
