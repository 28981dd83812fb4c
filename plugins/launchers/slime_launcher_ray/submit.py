"""Submit a job to a running Ray cluster and follow its output.

    `submit`     the job's folder -> Ray's job server, as the job's working directory
    `follow`     print the job's output until it ends; return its exit status

Called by `slime submit`, which wrote the folder (`slime_submit.folder`); on the cluster `slime_submit.job` reads it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import aiohttp
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from slime_core.errors import ConfigError, SlimeError
from slime_core.waits import gave_up, waiting

STOPPED_STATUS = 143
"""Exit status of `slime submit` if a user stopped the job; the same as of a process ended by SIGTERM."""
_PASSING = re.compile(r"No available agent|status code 5\d\d")
"""Errors of the job server while the cluster is starting or too busy."""
_LOOK = 0.5
_PATIENCE = 60.0
"""Seconds to wait for the job server to answer again."""


def submit(
    address: str, folder: Path, python: str, job_id: str | None, variables: Mapping[str, str]
) -> tuple[JobSubmissionClient, str]:
    """Submit the job with these environment variables. Returns the client used and the job's id.

    Raises:
        ConfigError: No server answers at the address, or the server refuses.
    """
    environment = {"working_dir": str(folder), "env_vars": dict(variables)}
    logging.getLogger("ray").setLevel(logging.ERROR)
    entry = f"exec {shlex.quote(python)} -m slime_submit.job"
    name, tried = job_id or f"raysubmit_{secrets.token_hex(8)}", False
    until = time.monotonic() + _PATIENCE
    with waiting(f"the job server at {address}", deadline=_PATIENCE, then="the command ends"):
        while True:
            try:
                client = JobSubmissionClient(address)
                client.submit_job(entrypoint=entry, runtime_env=environment, submission_id=name)
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                if tried and f"{name} already exists" in str(error):
                    return client, name  # an earlier try succeeded although it raised
                if _PASSING.search(str(error)) and time.monotonic() < until:
                    tried = True
                    time.sleep(_LOOK)
                    continue
                said = str(error).rstrip(". \n")
                raise ConfigError(
                    f"--address {address}: {said}. It must be the address of the cluster's dashboard, such as"
                    " http://10.0.0.1:8265"
                ) from error
            return client, name


def follow(client: JobSubmissionClient, job_id: str) -> int:
    """Print the job's output until it ends. Returns its exit status.

    Raises:
        SlimeError: The job server does not answer any more.
    """
    output, since = _Output(client, job_id), time.monotonic()
    with waiting(f"job {job_id}", deadline=None, then="as long as the job server answers"):
        while True:
            try:
                details = client.get_job_info(job_id)
                if details.status.is_terminal():
                    output.print_rest()
                    return _exit_status(job_id, details)
                if details.status != JobStatus.PENDING:
                    asyncio.run(output.print_on())
                since = time.monotonic()
            except (ConnectionError, RuntimeError, OSError, aiohttp.ClientError) as error:
                if time.monotonic() - since > _PATIENCE:
                    note = gave_up(f"job {job_id}", _PATIENCE, "the command ends, and the job may go on")
                    raise SlimeError(f"job {job_id}: the job server does not answer ({error}): {note}") from error
            time.sleep(_LOOK)


def _exit_status(job_id: str, details: JobDetails) -> int:
    if details.status == JobStatus.SUCCEEDED:
        return 0
    if details.status == JobStatus.STOPPED:
        print(f"slime: job {job_id} was stopped", file=sys.stderr)
        return STOPPED_STATUS
    if details.driver_exit_code is None:  # the job's command did not start
        raise SlimeError(f"job {job_id} failed: {details.message}")
    return int(details.driver_exit_code)


class _Output:
    """The output of a job. Each call prints only text not printed before, even if the last call was interrupted."""

    def __init__(self, client: JobSubmissionClient, job_id: str) -> None:
        self._client, self._job_id = client, job_id
        self._printed = 0
        """Number of characters printed."""

    async def print_on(self) -> None:
        """Print output as it arrives, until the job ends or the connection is lost: Ray reports both alike."""
        seen = 0
        async for text in self._client.tail_job_logs(self._job_id):
            self._print(text, seen)
            seen += len(text)

    def print_rest(self) -> None:
        """Print the remaining output of a job that has ended."""
        self._print(self._client.get_job_logs(self._job_id), 0)

    def _print(self, text: str, start: int) -> None:
        """Print the new part of a text that begins at character `start` of the output."""
        if new := text[max(0, self._printed - start) :]:
            sys.stdout.write(new)
            sys.stdout.flush()
            self._printed = start + len(text)
