"""`python -m slime_submit.job [FOLDER]`: the program of a job of `slime submit`; FOLDER is the current directory.

`folder.py` made the folder. A Ray job may share its folder with another, so files are changed by replacing them.

A scheduler may start a job again after a preemption or the loss of a node. The job then resumes the run that it began:
`RUN_DIR.jobs/ID/started` is written at the first start, and a `config.yaml` of the run directory that is newer is the
job's own. Exit status: that of the command, and 143 for a run that a signal ended early with a commit, so that no
scheduler takes it for complete.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

RUN, ORDER = "run.yaml", "job.json"
HERE = "/@the-job-s-folder@"
"""Placeholder for the folder's path on a Ray cluster, which only the job knows."""
DRAINED = 143
"""Exit status of a run that a signal ended with a commit, as of a process that SIGTERM ended."""
_ONCE = ("finetune", "overwrite", "no_load_optim", "no_load_rng")
"""Settings of a run's first start, which a restart leaves out."""


def main() -> int:
    """Run the command and return its exit status."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    _fill_in(folder)
    order = json.loads((folder / ORDER).read_text(encoding="utf-8"))
    try:
        os.chdir(order["directory"])
    except OSError as error:
        print(f"slime: error: {error}; the nodes need the directory of `slime submit`, or --directory", file=sys.stderr)
        return 2
    from slime_core.cli.main import main as slime

    words = [order["command"], "--config", str(folder / RUN)]
    if "run_dir" not in order:
        return slime(words)
    with tempfile.TemporaryDirectory(prefix="slime-job-") as name:
        if again := resumed(order):
            overlay = Path(name, "resume.yaml")
            overlay.write_text(json.dumps(again), encoding="utf-8")  # JSON is YAML
            words += ["--config", str(overlay)]
        status = slime([*words, "--run-dir", order["run_dir"]])
    return status or DRAINED * drained(Path(order["run_dir"]))


def resumed(order: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that make a restart resume its run; none at the job's first start, which is noted."""
    run_dir, save = Path(order["run_dir"]), Path(order["save"])
    started = Path(f"{run_dir}.jobs", order["id"], "started")
    try:
        began = started.stat().st_mtime_ns
        own = (run_dir / "config.yaml").stat().st_mtime_ns > began
    except FileNotFoundError:
        own = False
    if own:
        from slime_core.checkpoint.store import CheckpointStore

        committed = bool(CheckpointStore(save / "checkpoints").commits())
        first = dict.fromkeys(_ONCE, False) | {"ckpt_step": None} if committed else {"overwrite": False}
        # Without a commit of its own it loads again what the user named, if that is another run.
        return first if order["load"] and not committed else first | {"load": str(save)}
    started.parent.mkdir(parents=True, exist_ok=True)
    started.touch()
    return {}


def drained(run_dir: Path) -> bool:
    """Return whether the run's summary says that a signal ended it early."""
    try:
        return bool(json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["drained"])
    except (FileNotFoundError, KeyError):
        return False


def _fill_in(folder: Path) -> None:
    """Replace the placeholder of the folder's path in its YAML files."""
    for file in folder.rglob("*.y*ml"):
        text = file.read_bytes()
        if HERE.encode() in text:
            changed = file.with_name(f"{file.name}.{os.getpid()}")
            changed.write_bytes(text.replace(HERE.encode(), os.fsencode(folder)))
            changed.replace(file)


if __name__ == "__main__":
    sys.exit(main())
