"""Run a job on Slurm: write its batch script, submit it, and follow it to its end.

    script    the job's folder -> a batch script: one task per node, which runs `allocation`
    submit    sbatch
    follow    print the job's output, over requeues, until it ends; return its exit status

The script runs `srun` because Slurm sends the SIGTERM of a preemption with a grace time to the tasks of a step, and not
to the batch script. `allocation` requeues the job, because a job that ends within its grace time counts as complete.
Checked with Slurm 22.05.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slime_core.errors import ConfigError, SlimeError
from slime_core.waits import gave_up, waiting
from slime_submit.folder import without_settings
from slime_submit.job import DRAINED

SCRIPT = "job.sh"
COMMAND_S = 60.0
"""Deadline of a command of Slurm."""
_LOOK = 2.0
_PATIENCE = 120.0
"""Seconds to wait for Slurm to answer again."""
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
          "REVOKED", "TIMEOUT")  # fmt: skip
_NODES = re.compile(r"-N|--nodes\b")
_ARRAY = re.compile(r"-a|--array\b")
_AFTER_FIRST_END_S = 60
"""Seconds that Slurm leaves to the other tasks once one has ended."""


def script(folder: Path, directory: str, name: str, words: Sequence[str], *, python: str, nodes: int) -> str:
    """Return the batch script of a job.

    Args:
        folder: The job's folder.
        directory: Working directory of the run.
        name: Name of the job.
        words: The user's options of sbatch; they lie above slime's.
        python: Interpreter on the nodes.
        nodes: Number of nodes, if the options name none.

    Raises:
        ConfigError: The words are no options, or make several jobs of the run.
    """
    if words and not words[0].startswith("-"):
        raise ConfigError(f"slime submit: {words[0]}: not an option; options of sbatch stand before train or sft")
    options: list[list[str]] = []
    for word in words:
        if word.startswith("-"):
            options.append([])
        options[-1].append(word)
    if array := next((option for option in options if _ARRAY.match(option[0])), None):
        raise ConfigError(f"slime submit: {' '.join(array)}: a run is one job; submit each of several runs")
    own = [
        ["--job-name", name],
        ["--chdir", directory],
        ["--output", f"{folder}/slurm-%j.out"],
        ["--open-mode", "append"],
        ["--requeue"],
        *([] if any(_NODES.match(option[0]) for option in options) else [["--nodes", str(nodes)]]),
    ]
    lines = ["#!/bin/bash", *(f"#SBATCH {shlex.join(option)}" for option in [*own, *options])]
    task = shlex.join([python, "-m", "slime_submit.allocation", str(folder)])
    step = '--nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none'
    return "\n".join([*lines, f"exec srun {step} --wait={_AFTER_FIRST_END_S} {task}", ""])


def missing() -> str:
    """Return a message if this machine cannot submit jobs, otherwise an empty string."""
    return "" if shutil.which("sbatch") else "sbatch is not on PATH; submit from a login node, or type --dry-run"


def submit(path: Path) -> str:
    """Submit a batch script. Returns the job's id.

    Raises:
        ConfigError: Slurm refuses.
    """
    with waiting("sbatch", deadline=COMMAND_S, then="the command ends"):
        try:
            done = subprocess.run(
                ["sbatch", "--parsable", str(path)], env=without_settings(os.environ), capture_output=True, text=True,
                timeout=COMMAND_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"sbatch {path}: no answer within {COMMAND_S:g} s; `squeue --me` lists jobs") from error
    if done.returncode:
        raise ConfigError(f"sbatch {path}: {_message(done.stderr)}")
    return done.stdout.strip().partition(";")[0]


def look(job: str) -> dict[str, str]:
    """Return the fields of `scontrol show job`. Raises SlimeError if Slurm does not answer."""
    return _fields(ask("show", "job", job))


def ask(*words: str) -> str:
    """Return the output of a scontrol command. Raises SlimeError."""
    command = ["scontrol", *words]
    try:
        with waiting(shlex.join(command), deadline=COMMAND_S, then="an error"):
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlimeError(f"{shlex.join(command)}: {error}") from error
    if done.returncode:
        raise SlimeError(f"{shlex.join(command)}: {_message(done.stderr or done.stdout)}")
    return done.stdout


def follow(job: str) -> int:
    """Print the job's output until it ends. Returns its exit status.

    Raises:
        SlimeError: Slurm does not answer any more.
    """
    output, told, since = _Output(), "", time.monotonic()
    with waiting(f"job {job}", deadline=None, then="as long as Slurm answers"):
        while True:
            try:
                fields = look(job)
            except SlimeError as error:
                if time.monotonic() - since > _PATIENCE:
                    note = gave_up(f"job {job}", _PATIENCE, "the command ends, and the job may go on")
                    raise SlimeError(f"job {job}: Slurm does not answer ({error}): {note}") from error
            else:
                since = time.monotonic()
                output.print_on(fields["StdOut"])
                told = _tell(job, fields, told)
                if fields["JobState"] in _ENDED:
                    return _exit_status(job, fields)
            time.sleep(_LOOK)


def _tell(job: str, fields: dict[str, str], told: str) -> str:
    """Print that the job waits, or runs again, if that is new; return the text."""
    again = f" after restart {fields['Restarts']}" if fields["Restarts"] != "0" else ""
    text = {
        "PENDING": f"waits{again} for {fields['Reason']}" if fields["Reason"] != "None" else told,
        "RUNNING": f"runs{again} on {fields['NodeList']}",
    }.get(fields["JobState"], told)
    if text != told:
        print(f"slime: job {job} {text}", file=sys.stderr, flush=True)
    return text


def _exit_status(job: str, fields: dict[str, str]) -> int:
    state = fields["JobState"]
    status, _, number = fields["ExitCode"].partition(":")
    if state != "COMPLETED":
        print(f"slime: job {job}: {state}; its output is {fields['StdOut']}", file=sys.stderr)
    if state == "CANCELLED":
        return DRAINED
    return int(status) or (128 + int(number) if int(number) else int(state != "COMPLETED"))


class _Output:
    """The output file of a job. Each call prints only text not printed before."""

    def __init__(self) -> None:
        self._printed: dict[str, int] = {}
        """Number of bytes printed, by file."""

    def print_on(self, path: str) -> None:
        """Print the new text of the file, which exists once the job has started."""
        try:
            with open(path, "rb") as file:
                file.seek(self._printed.get(path, 0))
                new = file.read()
        except FileNotFoundError:
            return
        self._printed[path] = self._printed.get(path, 0) + len(new)
        sys.stdout.write(new.decode(errors="replace"))
        sys.stdout.flush()


def _fields(text: str) -> dict[str, str]:
    """Return the fields of a job; a path is the rest of its line."""
    paths = re.findall(r"^\s*(StdOut)=(.*)$", text, re.MULTILINE)
    return dict([*re.findall(r"(\w+)=(\S*)", text), *paths])


def _message(text: str) -> str:
    """Return Slurm's message without the name of its command."""
    return re.sub(r"^\w+: (error: )?", "", text.strip().replace("\n", "; "))
