"""Write YAML that has a job's folder in it: a Job of Kubernetes, a RayJob of KubeRay, a task of SkyPilot.

On one node the container runs `job`. On several, Ray runs on each of them, started by KubeRay or by the task's
commands, and `job` on the first. A volume has the directory in which the run works, so that a job that starts again
finds its commits. The schemas are those of Kubernetes 1.31, KubeRay 1.4 (ray.io/v1) and SkyPilot 0.10, or later.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slime_core.errors import ConfigError
from slime_core.secrets import hidden

FOLDER = "/tmp/slime-job"
"""Path of the job's folder in a container."""
_LIMIT = 1 << 20
"""Largest Secret of Kubernetes, in bytes."""
_RETRIES = 3
_WRONG = 2
"""Exit status for a wrong setting, with which another try would end, too."""
_MARGIN_S = 30
_GROUP = 1000
"""Group that may write the volume: that of the images of `docker/`."""
_RAY_PORT = 6479
"""Port of the task's own Ray; SkyPilot's has 6380."""


@dataclass(frozen=True)
class Volume:
    """A volume of the cluster, `--volume NAME:/PATH`."""

    name: str
    path: str

    @property
    def is_bucket(self) -> bool:
        """Whether it is object storage, which SkyPilot mounts."""
        return "://" in self.name

    @classmethod
    def of(cls, text: str) -> Volume:
        """Parse the option. Raises ConfigError."""
        name, _, path = text.rpartition(":")
        if not name or not path.startswith("/") or path.startswith("//"):
            raise ConfigError(f"--volume {text}: must be NAME:/PATH, the volume and where it is mounted")
        return cls(name, path.rstrip("/") or "/")

    def check_holds(self, place: Path) -> None:
        """Raise ConfigError if a directory would be lost with its container."""
        if not place.is_relative_to(self.path):
            raise ConfigError(
                f"--volume {self.name}:{self.path}: {place} is outside of it and would be lost with the container; name"
                f" a directory below {self.path} with --directory, --run-dir or --save"
            )


@dataclass(frozen=True)
class Job:
    """The options of a job."""

    name: str
    python: str
    image: str | None
    volume: Volume
    gpus: str
    """GPUs of a node: a number, or for SkyPilot TYPE:NUMBER; empty: none."""
    nodes: int
    drain_timeout: float
    env_from: Sequence[str] = ()
    """Secrets of Kubernetes that become variables of the environment; for SkyPilot, the variables."""

    @property
    def command(self) -> list[str]:
        """The program of the job."""
        return [self.python, "-m", "slime_submit.job", FOLDER]


def files(folder: Path) -> dict[str, str]:
    """Return the files of a job's folder: path in it -> content.

    Raises:
        ConfigError: A file is not text, has a secret, or all are too large together.
    """
    found: dict[str, str] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        try:
            found[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name}: not text ({error}), and the job's YAML has the files in it") from error
        if hidden(found[name]) != found[name]:
            raise ConfigError(
                f"{name} would have a secret of the settings in it; set it as a variable of the environment instead, by"
                " --env-from NAME"
            )
    if (size := sum(len(text.encode()) for text in found.values())) > _LIMIT:
        raise ConfigError(f"the files that the settings name are {size} bytes, and a Secret has at most {_LIMIT}")
    return found


def kubernetes(job: Job, contents: Mapping[str, str]) -> str:
    """Return a Secret with the files, and a Job or, for several nodes, a RayJob."""
    order = yaml.safe_load(contents["job.json"])
    name = f"{_dns(job.name)}-{order['id']}"
    keys = {path: f"{number}.{re.sub('[^-._a-zA-Z0-9]', '_', Path(path).name)}" for number, path in enumerate(contents)}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "stringData": {keys[path]: text for path, text in contents.items()},
    }
    items = [{"key": key, "path": path} for path, key in keys.items()]
    write = _job if job.nodes == 1 else _ray_job
    documents = [secret, write(job, name, items)]
    return _dumped(documents)


def _job(job: Job, name: str, items: list[dict[str, str]]) -> dict[str, Any]:
    pod = _pod(job, name, items, "slime")
    pod["containers"][0]["command"] = job.command
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": "slime", "operator": "In", "values": [_WRONG]}},
        # An eviction or preemption is no failure: the pod is replaced, and the run resumes.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    spec = {
        "backoffLimit": _RETRIES,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": {"restartPolicy": "Never", **pod}},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def _ray_job(job: Job, name: str, items: list[dict[str, str]]) -> dict[str, Any]:
    head, worker = (_pod(job, name, items, container) for container in ("ray-head", "ray-worker"))
    others = job.nodes - 1
    workers = {
        "groupName": "nodes",
        "replicas": others,
        "minReplicas": others,
        "maxReplicas": others,
        "rayStartParams": {},
        "template": {"spec": worker},
    }
    spec = {
        "entrypoint": shlex.join(job.command),
        "backoffLimit": _RETRIES,
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": {
            "headGroupSpec": {"rayStartParams": {}, "template": {"spec": head}},
            "workerGroupSpecs": [workers],
        },
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name}, "spec": spec}


def _pod(job: Job, secret: str, items: list[dict[str, str]], container: str) -> dict[str, Any]:
    """Return the specification of a pod."""
    volumes = [
        {"name": "job", "secret": {"secretName": secret, "items": items}},
        {"name": "work", "persistentVolumeClaim": {"claimName": job.volume.name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # the default of 64 MiB is too small for NCCL
    ]
    paths = {"job": FOLDER, "work": job.volume.path, "shared-memory": "/dev/shm"}
    described: dict[str, Any] = {
        "name": container,
        "image": job.image,
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in paths.items()],
    }
    if job.env_from:
        described["envFrom"] = [{"secretRef": {"name": name}} for name in job.env_from]
    if job.gpus:
        if not job.gpus.isdecimal():
            raise ConfigError(f"--gpus {job.gpus}: must be a number of GPUs per node")
        described["resources"] = {"limits": {"nvidia.com/gpu": job.gpus}}
    seconds = math.ceil(job.drain_timeout) + _MARGIN_S
    return {
        "terminationGracePeriodSeconds": seconds,
        "securityContext": {"fsGroup": _GROUP, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [described],
        "volumes": volumes,
    }


def skypilot(job: Job, contents: Mapping[str, str]) -> str:
    """Return a task whose set-up writes the files. Raises ConfigError."""
    volume = job.volume
    if volume.is_bucket and job.nodes > 1:
        raise ConfigError(
            f"--volume {volume.name}:{volume.path}: {job.nodes} nodes cannot share a bucket; name a volume of SkyPilot"
        )
    setup = [f"mkdir -p {shlex.join(sorted({str(Path(FOLDER, path).parent) for path in contents}))}"]
    for path, text in contents.items():
        end = "END_OF_FILE"
        while end in text:
            end += "_"
        setup.append(f"cat > {shlex.quote(f'{FOLDER}/{path}')} <<'{end}'\n{text.rstrip(chr(10))}\n{end}")
    resources = {"accelerators": job.gpus, "image_id": f"docker:{job.image}" if job.image else ""}
    # A file of a bucket can be appended to in this mode only, as a run does.
    bucket = {"file_mounts": {volume.path: {"source": volume.name, "mode": "MOUNT_CACHED"}}}
    task: dict[str, Any] = {
        "name": _dns(job.name),
        "num_nodes": job.nodes,
        "resources": {key: value for key, value in resources.items() if value},
        **({"secrets": dict.fromkeys(job.env_from)} if job.env_from else {}),
        **(bucket if volume.is_bucket else {"volumes": {volume.path: volume.name}}),
        "setup": "\n".join(setup) + "\n",
        "run": _sky_commands(job),
    }
    return _dumped([task])


def _sky_commands(job: Job) -> str:
    command = shlex.join(job.command)
    if job.nodes == 1:
        return f"exec {command}\n"
    ray = f"{shlex.quote(job.python)} -m ray.scripts.scripts start --disable-usage-stats"
    return f"""export RAY_ADDRESS="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{_RAY_PORT}"
if [ "$SKYPILOT_NODE_RANK" != 0 ]; then
  for try in $(seq 60); do
    env -u RAY_ADDRESS {ray} --address "$RAY_ADDRESS" && exit 0
    sleep 5
  done
  exit 1
fi
env -u RAY_ADDRESS {ray} --head --port {_RAY_PORT} --include-dashboard false
exec {command}
"""


class _Dumper(yaml.SafeDumper):
    """A dumper that writes texts of several lines as they are."""


def _represent(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent)


def _dumped(documents: list[Any]) -> str:
    return str(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1 << 20))


def _dns(name: str) -> str:
    """Return a name as KubeRay allows it: lower case, digits and hyphens after a letter, 47 characters with the id."""
    words = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-") or "slime"
    return (words if words[0].isalpha() else f"run-{words}")[:26].rstrip("-")


WRITERS: Mapping[str, Callable[[Job, Mapping[str, str]], str]] = {"k8s": kubernetes, "skypilot": skypilot}
