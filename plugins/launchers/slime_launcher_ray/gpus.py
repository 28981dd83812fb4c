"""Find the GPUs that the rollout actor shows to its engine's servers: those of the run's bundles on its node.

Ray gives the rollout actor no GPU, since it computes nothing itself. Its engine numbers GPUs like the plan, by ordinal
on the node (`engines/sglang/placement.py`). So CUDA_VISIBLE_DEVICES lists the GPUs of all the run's bundles there,
including the trainer's, in the order of the plan. Called by `Actors.assemble`. Trainer ranks hold their whole GPU and
report it themselves; a task reports the GPU of an empty bundle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ray

from slime_core.errors import ConfigError
from slime_core.waits import waiting
from slime_launcher_ray.placement import SMALLEST_SHARE, Placement
from slime_launcher_ray.placing import Reserved

_DEADLINE = 60.0
"""Seconds for a task that only reports its GPU."""


@dataclass(frozen=True)
class SeenGpu:
    """The GPU of one bundle."""

    node: str
    """Ray's id of the node."""
    gpu: str
    """Name of the GPU in CUDA_VISIBLE_DEVICES."""


def gpu_here() -> tuple[str, list[str]]:
    """Return the id of this node, and the GPUs that Ray assigned to this process."""
    return ray.get_runtime_context().get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]


def seen_by_tasks(placement: Placement, reserved: Reserved) -> dict[int, SeenGpu]:
    """Return bundle -> GPU for the bundles without a trainer rank.

    Raises:
        ConfigError: Ray did not run the tasks in time.
    """
    taken = {trainer.bundle for trainer in placement.trainers}
    look = ray.remote(gpu_here)
    found = {
        bundle.index: look.options(**reserved.options(bundle.index, 0.0, SMALLEST_SHARE)).remote()
        for bundle in placement.bundles
        if bundle.gpus and bundle.index not in taken
    }
    with waiting("tasks that look at GPUs", deadline=_DEADLINE, then="the run stops"):
        try:
            answers = ray.get(list(found.values()), timeout=_DEADLINE)
        except ray.exceptions.RayError as error:
            raise ConfigError(
                f"the GPUs of the engines could not be looked at within {_DEADLINE:.0f} s: {error}"
            ) from error
    return {bundle: SeenGpu(node, gpus[0]) for bundle, (node, gpus) in zip(found, answers)}


def visible_to_servers(placement: Placement, seen: Mapping[int, SeenGpu], node: str) -> str:
    """Return CUDA_VISIBLE_DEVICES of the rollout actor, for the servers that it starts.

    Args:
        placement: The plan.
        seen: GPU of every bundle.
        node: Ray's id of the rollout actor's node.

    Raises:
        ConfigError: Ray spread the bundles of one planned node over several nodes, or put the engines elsewhere.
    """
    numbers = {number for engine in placement.engines for number in engine.nodes}
    bundles = [bundle.index for bundle in placement.bundles if bundle.node in numbers]
    astray = [bundle for bundle in bundles if seen[bundle].node != node]
    if astray:
        raise ConfigError(
            f"Ray has places {', '.join(map(str, astray))} of the run on another node than the rollout, which starts"
            " the servers; --num-gpus-per-node must be what a node of the cluster has, and other runs must"
            " leave nodes whole"
        )
    return ",".join(seen[bundle].gpu for bundle in bundles)
