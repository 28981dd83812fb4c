"""`slime submit` (train): run train or sft as a job of Ray, Slurm, Kubernetes or SkyPilot.

What can be found wrong is found before anything is sent. Ray is imported when it is.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime_launcher_ray.plugin import RayLauncher

from slime_core.errors import ConfigError
from slime_core.plugins.commands import Parser
from slime_core.protocols import Command

if TYPE_CHECKING:
    from slime_core.config import Settings

COMMANDS = ("train", "sft")
_ADDRESS = "RAY_API_SERVER_ADDRESS"
_HELP = """usage: slime submit [--to ray|slurm|k8s|skypilot] [options] train|sft [RUN.yaml] [flags]

Check the run and send it to a cluster as a job. Files that the settings name go along: plugins given as files with the
modules beside them, --plugin-dir, YAML files. Models and data must be on the cluster.

  --to ray         a running Ray cluster (default)
  --to slurm       the cluster of this login node; all other options go to sbatch: --partition gpu --gres gpu:8
  --to k8s         write YAML for kubectl: a Job, or with --nodes above 1 a RayJob of KubeRay; only with --dry-run
  --to skypilot    write YAML for sky jobs launch; only with --dry-run

  --no-check       look at the settings only, for a machine that has not the cluster's models, data and plugins
  --directory DIR  where the job runs, on the cluster; by default this directory, which its nodes must see
  --python PYTHON  interpreter on the cluster; by default python, with slurm the one of this command
  --no-wait        ray, slurm: end once the job is submitted
  --dry-run        slurm, k8s, skypilot: print what would be submitted
  --address URL    ray: dashboard of the cluster, such as http://10.0.0.1:8265; by default RAY_API_SERVER_ADDRESS
  --job-id ID      ray: name of the job; by default Ray makes one
  --image IMAGE    k8s, skypilot: container image with slime in it
  --volume NAME:/PATH  k8s: a PersistentVolumeClaim, skypilot: a volume or bucket (s3://...), which has --directory
  --env-from NAME  k8s: a Secret, skypilot: a variable, that the environment gets, such as a token; repeatable
  --nodes N        k8s, skypilot: number of nodes; by default --actor-num-nodes
  --gpus N         k8s: GPUs per node; skypilot: accelerators per node, such as H100:8

Options of submit come before the command; all flags after it are settings. Ctrl-C ends the printing, not the job;
`ray job stop ID` or `scancel ID` stops it. A job of Slurm, Kubernetes or SkyPilot that starts again resumes its run.
Exit status: that of the job, 143 when it was stopped, 2 when nothing was submitted."""


def run(argv: list[str]) -> int:
    """Submit, and follow. Raises ConfigError for what is wrong before, and PluginError."""
    # Of two such words in a row the first is an option's value, as in `--partition train train`.
    commands = (at for at, word in enumerate(argv) if word in COMMANDS and not {*argv[at + 1 : at + 2]} & {*COMMANDS})
    command = next(commands, None)
    own_words = argv[:command]
    if not argv or "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0
    own, rest = _options([word for word in own_words if word != "--"])
    if command is None:
        raise ConfigError(f"slime submit: which command? Type one of {', '.join(COMMANDS)} before its flags")
    return _TARGETS[own.to](own, rest, argv[command:])


def _options(words: list[str]) -> tuple[Namespace, list[str]]:
    """Return submit's options of the chosen scheduler, and those of sbatch."""
    parser = Parser(prog="slime submit", add_help=False, allow_abbrev=False)
    parser.add_argument("--to", choices=tuple(_TARGETS), default="ray")
    to = parser.parse_known_args(words)[0].to
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--directory", type=os.path.abspath, default=os.getcwd())
    parser.add_argument("--python", default=sys.executable if to == "slurm" else "python")
    if to in ("ray", "slurm"):
        parser.add_argument("--no-wait", action="store_true")
    if to == "ray":
        parser.add_argument("--address")
        parser.add_argument("--job-id")
    else:
        parser.add_argument("--dry-run", action="store_true")
    if to in ("k8s", "skypilot"):
        parser.add_argument("--image", required=to == "k8s")
        parser.add_argument("--volume", required=True)
        parser.add_argument("--env-from", action="append", default=[])
        parser.add_argument("--nodes", type=int)
        parser.add_argument("--gpus", default="")
    own, rest = parser.parse_known_args(words)
    if rest and to != "slurm":
        raise ConfigError(f"slime submit: unrecognized arguments: {' '.join(rest)}")
    return own, rest


def _ray(own: Namespace, rest: list[str], words: list[str]) -> int:
    if lacking := RayLauncher().missing():
        raise ConfigError(f"slime submit: {lacking}")
    address = own.address or os.environ.get(_ADDRESS)
    if not address:
        raise ConfigError(f"slime submit: --address http://HOST:8265 or {_ADDRESS} must say where the dashboard is")
    settings = _checked(words, check=not own.no_check, ray=True)
    from slime_launcher_ray.shell import environment_to_carry
    from slime_launcher_ray.submit import follow, submit

    from slime_submit.folder import make_job, without_settings

    with tempfile.TemporaryDirectory(prefix="slime-job-") as name:
        make_job(settings, Path(name), own.directory)
        variables = without_settings(environment_to_carry())
        client, job = submit(address, Path(name), own.python, own.job_id, variables)
    print(f"job {job} submitted to {address}", flush=True)
    stop = f"`ray job stop {job} --address {address}` stops it"
    if own.no_wait:
        print(f"`ray job logs -f {job} --address {address}` follows it; {stop}")
        return 0
    return _followed(job, lambda: follow(client, job), stop)


def _slurm(own: Namespace, rest: list[str], words: list[str]) -> int:
    from slime_submit import slurm
    from slime_submit.folder import job_folder, make_job

    if not own.dry_run and (lacking := slurm.missing()):
        raise ConfigError(f"slime submit: {lacking}")
    settings = _checked(words, check=not own.no_check)
    folder = job_folder(settings, own.directory)
    text = slurm.script(
        folder, own.directory, _name(settings), rest, python=own.python, nodes=settings.args.actor_num_nodes
    )
    folder.mkdir(parents=True, mode=0o700)
    make_job(settings, folder, own.directory, there=str(folder), restarts=True)
    script = folder / slurm.SCRIPT
    script.write_text(text, encoding="utf-8")
    if own.dry_run:
        print(text, end="")
        print(f"slime: `sbatch {script}` submits it", file=sys.stderr)
        return 0
    job = slurm.submit(script)
    print(f"job {job} submitted; its folder is {folder}", flush=True)
    stop = f"`scancel {job}` stops it"
    if own.no_wait:
        print(stop)
        return 0
    return _followed(job, lambda: slurm.follow(job), stop)


def _manifest(own: Namespace, rest: list[str], words: list[str]) -> int:
    from slime_submit import manifests
    from slime_submit.folder import job_folder, make_job, run_places

    submits = {"k8s": "kubectl create -f job.yaml", "skypilot": "sky jobs launch job.yaml"}[own.to]
    if not own.dry_run:
        raise ConfigError(f"slime submit: --to {own.to} only writes YAML: type --dry-run, then `{submits}`")
    volume = manifests.Volume.of(own.volume)
    settings = _checked(words, check=not own.no_check, ray=(own.nodes or 1) > 1)
    for place in (Path(own.directory), *run_places(settings, own.directory)):
        volume.check_holds(place)
    job = manifests.Job(
        name=_name(settings), python=own.python, image=own.image, volume=volume, gpus=own.gpus,
        nodes=own.nodes or settings.args.actor_num_nodes, drain_timeout=settings.args.drain_timeout,
        env_from=own.env_from,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="slime-job-") as name:
        folder = Path(name, job_folder(settings, own.directory).name)
        folder.mkdir()
        make_job(settings, folder, own.directory, there=manifests.FOLDER, restarts=True)
        print(manifests.WRITERS[own.to](job, manifests.files(folder)), end="")
    return 0


_TARGETS: Mapping[str, Callable[[Namespace, list[str], list[str]], int]] = {
    "ray": _ray,
    "slurm": _slurm,
    "k8s": _manifest,
    "skypilot": _manifest,
}


def _followed(job: str, follow: Callable[[], int], stop: str) -> int:
    try:
        return follow()
    except KeyboardInterrupt:
        print(f"slime: job {job} goes on; {stop}", file=sys.stderr)
        raise


def _checked(words: list[str], *, check: bool, ray: bool = False) -> Settings:
    """Return the command's settings. Raises ConfigError and PluginError for what can be found wrong here.

    Args:
        words: Command and flags.
        check: Look at models, data and plugins, too.
        ray: The job's processes run on a Ray cluster.
    """
    from slime_core.plugins.presets import load_settings

    settings = load_settings(words[1:], command=words[0], fetch=check)
    args = settings.args
    if args.ray_address:
        raise ConfigError(f"{settings.cite('ray_address')}: `slime submit --address URL` says which cluster; remove it")
    if args.launcher == "auto" and (ray or args.actor_num_nodes > 1):
        settings.derive("launcher", "ray", "slime submit")
    if check:
        from slime_commands.check.preflight import starting

        from slime_core.launch.prepare import prepare, run_preflight

        prepared = prepare(copy.deepcopy(settings), make=False)  # makes its paths those of this directory
        for finding in starting(prepared):
            raise ConfigError(finding.message)
        if prepared.args.preflight:
            run_preflight(prepared)
    return settings


def _name(settings: Settings) -> str:
    return Path(str(settings.args.run_dir)).name


command = Command(run)
