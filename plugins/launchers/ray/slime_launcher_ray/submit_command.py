"""`slime submit` (train): run train or sft as a job of a Ray cluster.

What can be found wrong is found before anything is sent. Ray is imported when it is.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.errors import ConfigError
from slime_core.plugins.commands import Parser
from slime_core.protocols import Command
from slime_launcher_ray.plugin import RayLauncher

if TYPE_CHECKING:
    from slime_core.config import Settings

COMMANDS = ("train", "sft")
_ADDRESS = "RAY_API_SERVER_ADDRESS"
_HELP = """usage: slime submit [--address URL] [--no-wait] [--no-check] [--directory DIR] [--python PYTHON]
                    [--job-id ID] train|sft [RUN.yaml] [flags]

Check the run, send it to a Ray cluster as a job, and print what it prints. Files that the settings name go along:
plugins given as files with the modules beside them, --plugin-dir, YAML files. Models and data must be on the cluster.

  --address URL    dashboard of the cluster, such as http://10.0.0.1:8265; by default RAY_API_SERVER_ADDRESS
  --no-wait        end once the job is submitted
  --no-check       look at the settings only, for a machine that has not the cluster's models, data and plugins
  --directory DIR  where the job runs, on the cluster; by default this directory, which its nodes must see
  --python PYTHON  interpreter on the cluster (default python)
  --job-id ID      name of the job; by default Ray makes one

Options of submit come before the command; all flags after it are settings. Ctrl-C ends the printing, not the job;
`ray job stop ID` stops it. Exit status: that of the job, 143 when it was stopped, 2 when nothing was submitted."""


def run(argv: list[str]) -> int:
    """Submit, and follow. Raises ConfigError for what is wrong before, and PluginError."""
    command = next((index for index, word in enumerate(argv) if word in COMMANDS), None)
    own_words = argv[:command]
    if not argv or "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0
    parser = Parser(prog="slime submit", add_help=False, allow_abbrev=False)
    parser.add_argument("--address")
    parser.add_argument("--no-wait", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--directory")
    parser.add_argument("--python", default="python")
    parser.add_argument("--job-id")
    own = parser.parse_args([word for word in own_words if word != "--"])
    if command is None:
        raise ConfigError(f"slime submit: which command? Type one of {', '.join(COMMANDS)} before its flags")
    if lacking := RayLauncher().missing():
        raise ConfigError(f"slime submit: {lacking}")
    address = own.address or os.environ.get(_ADDRESS)
    if not address:
        raise ConfigError(f"slime submit: --address http://HOST:8265 or {_ADDRESS} must say where the dashboard is")
    return _submit(own, address, argv[command], argv[command + 1 :])


def _submit(own: Namespace, address: str, command: str, rest: list[str]) -> int:
    settings = _checked(command, rest, check=not own.no_check)
    from slime_launcher_ray.submit import follow, make_job, submit

    with tempfile.TemporaryDirectory(prefix="slime-job-") as name:
        make_job(settings, Path(name), own.directory or os.getcwd())
        client, job = submit(address, Path(name), own.python, own.job_id)
    print(f"job {job} submitted to {address}", flush=True)
    stop = f"`ray job stop {job} --address {address}` stops it"
    if own.no_wait:
        print(f"`ray job logs -f {job} --address {address}` follows it; {stop}")
        return 0
    try:
        return int(follow(client, job))
    except KeyboardInterrupt:
        print(f"slime: job {job} goes on; {stop}", file=sys.stderr)
        raise


def _checked(command: str, rest: list[str], *, check: bool) -> Settings:
    """The command's settings. Raises ConfigError and PluginError for what can be found wrong here."""
    from slime_core.plugins.presets import load_settings

    settings = load_settings(rest, command=command, fetch=check)
    args = settings.args
    if args.ray_address:
        raise ConfigError(f"{settings.cite('ray_address')}: `slime submit --address URL` says which cluster; remove it")
    if args.launcher == "auto":
        settings.derive("launcher", "ray", "slime submit")
    if check:
        from slime_commands.check.preflight import starting

        from slime_core.launch.prepare import prepare, run_preflight

        prepared = prepare(settings, make=False)
        for finding in starting(prepared):
            raise ConfigError(finding.message)
        if args.preflight:
            run_preflight(prepared)
    return settings


command = Command(run)
