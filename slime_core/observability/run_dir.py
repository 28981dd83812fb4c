"""The run directory: `config.yaml`, `summary.json`, and which one may be written to."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.config.run_files import CHECKPOINTS, CONFIG, HEADER, OUTPUT, RUN_FILES, SUMMARY
from slime_core.distributions import BUNDLE, CORE, installed
from slime_core.errors import ConfigError, RecordError
from slime_core.protocols import Args

__all__ = ["CHECKPOINTS", "CONFIG", "OUTPUT", "RUN_FILES", "SUMMARY"]
_READ = ("hf_checkpoint", "ref_load", "critic_load", "opd_teacher_load", "prompt_data", "load")
"""Settings whose files a new run reads."""


def run_dir_of(args: Args) -> Path:
    """The run's directory, which the settings' rules have filled in."""
    assert args.run_dir, "every command that writes has a run directory"
    return Path(args.run_dir)


def check_run_dir(args: Args, *, resume: bool) -> list[Path]:
    """Return what is there of another run, in `--run-dir` and in `--save`.

    Args:
        args: The run's settings.
        resume: The records there are this run's.

    Raises:
        ConfigError: It may be neither continued nor overwritten.
    """
    run_dir = run_dir_of(args)
    commits = Path(args.save or run_dir) / CHECKPOINTS
    places = dict.fromkeys((*(run_dir / name for name in RUN_FILES), commits))
    used = [path for path in places if path.exists()]
    if resume:
        return used
    another = f"choose another {'--save' if args.save else '--run-dir'}"
    if not args.overwrite:
        check_dumps(args)
    if used and not args.overwrite:
        go_on = f"Continue it with --load {commits.parent}," if commits in used else "No checkpoint is there to load:"
        raise ConfigError(
            f"{used[0].parent} already holds a run ({', '.join(path.name for path in used)}). {go_on}"
            f" start over with --overwrite, or {another}"
        )
    if foreign := [path for path in used if not _is_of_run(path)]:
        raise ConfigError(
            f"{', '.join(map(str, foreign))}: not a run's, as far as slime can tell ({foreign[0].parent} has no"
            f" {CONFIG} of slime's), so --overwrite does not touch it; {another}"
        )
    for name in _READ:
        named = Path(getattr(args, name, None) or os.devnull).resolve()
        if any(path.resolve() in (named, *named.parents) for path in used):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {named} is part of the run that --overwrite would replace; {another}")
    return used


def _is_of_run(path: Path) -> bool:
    """Return whether a run's file or folder is slime's: a `config.yaml` of slime's is next to it, or commits are in it.

    A run that was killed while its processes started has their output alone.
    """
    config = path.parent / CONFIG
    if config.is_file():
        return config.read_text(encoding="utf-8", errors="replace").startswith(HEADER)
    return path.name in OUTPUT or (path.name == CHECKPOINTS and (path / "latest").is_file())


def check_dumps(args: Args) -> None:
    """Raise ConfigError if the first file of samples or batches that the run would write is there already."""
    for name in ("save_debug_rollout_data", "save_debug_train_data"):
        template = getattr(args, name, None)
        if template and (path := Path(template.format(rollout_id=args.start_rollout_id or 0))).exists():
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {template}: {path} is there already; --overwrite writes over it")


def check_there(run_dir: Path, cause: BaseException | None = None) -> None:
    """Raise RecordError if the directory has been moved or removed since the run began."""
    if not run_dir.is_dir():
        raise RecordError(
            f"{run_dir} has been moved or removed while the run wrote to it. Where it was moved, the same command with"
            " --run-dir and --load of the new place continues from its last commit"
        ) from cause


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
