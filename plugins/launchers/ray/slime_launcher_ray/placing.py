"""A `Placement` -> a placement group of Ray, waited for with a deadline; where each actor goes in it.

The launcher calls `plan`, then `reserve`, before any actor exists. Ray numbers bundles in the order they were asked for
and lays them on nodes as it likes, so the bundles of the plan are taken in the order of nodes, and ranks that the plan
has on one node are on one node.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import get_node_ip_address, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_core.errors import ConfigError, TrainError
from slime_core.launch.prepare import Prepared
from slime_core.protocols import Args
from slime_core.waits import waiting
from slime_launcher_ray.placement import Placement, engines_of, plan_placement, settle_trainer

logger = logging.getLogger(__name__)

_LOOK = 5.0
"""Seconds between looks while waiting."""
_NODE_LABEL = "ray.io/node-id"


def plan(run: Prepared) -> Placement:
    """Place the run on the cluster that this process has joined.

    Raises:
        ConfigError: It does not fit; with the arithmetic.
    """
    args, there = run.args, ray.cluster_resources()
    num_gpus, num_cpus = int(there.get("GPU", 0)), float(there.get("CPU", 0))
    if args.device == "cuda" and not num_gpus:
        raise ConfigError(f"{run.settings.cite('device')}: the Ray cluster has no GPU ({shown(there)})")
    gpus = args.device != "cpu" and num_gpus > 0
    if gpus:
        settle_trainer(run.settings, run.processes)
    engines, warnings = engines_of(run.parts.engine, run.settings, num_gpus if gpus else 0)
    if args.device != "cpu":  # otherwise they were told before the cluster was known
        for warning in warnings:
            logger.warning("%s", warning)
    placement = plan_placement(
        args,
        trainer_processes=run.processes,
        engines=engines,
        gpus=gpus,
        num_gpus=num_gpus if gpus else None,
        num_cpus=num_cpus,
    )
    _check_nodes(args, placement)
    check_one_node(run.parts.engine, placement)
    return placement


def cluster_gpus(args: Args) -> int:
    """GPUs that the run may use, over all nodes of the cluster joined."""
    return 0 if args.device == "cpu" else int(ray.cluster_resources().get("GPU", 0))


def check_one_node(engine: Any, placement: Placement) -> None:
    """Raise ConfigError when servers that the rollout actor starts would lie on several nodes."""
    nodes = sorted({node for place in placement.engines for node in place.nodes})
    if placement.device != "cuda" or not hasattr(engine, "launch_plan") or len(nodes) < 2:
        return
    raise ConfigError(
        f"the engines would lie on nodes {', '.join(map(str, nodes))}, and the rollout starts servers on its own node"
        " only: ask for as many GPUs (--rollout-num-gpus) as one node has left, or start the servers of the other nodes"
        " yourself and name them with --rollout-external-engine-addrs"
    )


def _check_nodes(args: Args, placement: Placement) -> None:
    """Without GPUs the places say nothing of nodes, and one node would take them all."""
    wanted, there = _trainer_nodes(placement), len(_nodes())
    if placement.device == "cpu" and wanted > there:
        raise ConfigError(
            f"--actor-num-nodes {args.actor_num_nodes}: the Ray cluster has {there} node{'s' * (there != 1)}"
        )


def _trainer_nodes(placement: Placement) -> int:
    return len({trainer.node for trainer in placement.trainers})


def _nodes() -> list[dict[str, Any]]:
    """Of the cluster, this process's first, then those with most CPUs."""
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    return sorted(alive, key=lambda n: (n["NodeID"] != here, -n["Resources"]["CPU"], n["NodeID"]))


def _labels(placement: Placement) -> list[dict[str, str]] | None:
    """Which node each bundle must be on; None where Ray's packing does it: nodes are full with their GPUs."""
    if placement.device == "cuda" or _trainer_nodes(placement) < 2:
        return None
    ids = [node["NodeID"] for node in _nodes()]
    of_bundle = {trainer.bundle: {_NODE_LABEL: ids[trainer.node]} for trainer in placement.trainers}
    return [of_bundle.get(bundle.index, {}) for bundle in placement.bundles]


@dataclass
class Reserved:
    """A placement group that is there."""

    group: Any
    order: list[int]
    """Bundle of the plan -> bundle of the group."""

    def options(self, bundle: int, cpus: float, gpus: float) -> dict[str, Any]:
        """Of an actor in that bundle of the plan."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.order[bundle])
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}

    @property
    def complete(self) -> bool:
        """Whether all bundles are there, as far as Ray has noticed."""
        return bool(placement_group_table(self.group)["state"] == "CREATED")

    def wait_for_nodes(self, deadline: float) -> None:
        """Wait until all bundles are there, as they are unless a node has gone. Raises TrainError."""
        end = time.monotonic() + deadline
        with waiting("the bundles of a node that went", deadline=deadline, then="the run stops"):
            while (state := placement_group_table(self.group)["state"]) != "CREATED":
                if time.monotonic() >= end:
                    raise TrainError(
                        f"a node of the run went, and no other took its place within {deadline:.0f} s"
                        f" (--ray-placement-timeout; the placement group is {state}, the cluster has"
                        f" {shown(ray.cluster_resources())}). Earlier commits are intact: --load goes on"
                    )
                time.sleep(min(_LOOK, max(0.0, end - time.monotonic())) / 10)

    def close(self) -> None:
        """Give the bundles back."""
        remove_placement_group(self.group)


def reserve(placement: Placement, name: str, deadline: float) -> Reserved:
    """Wait until Ray has all bundles.

    Args:
        placement: The plan.
        name: Of the group, for Ray's own tools.
        deadline: Seconds; others on the cluster may have to end first.

    Raises:
        ConfigError: They did not come in time; says what was asked for, what the cluster has and what is free of it.
    """
    labels = _labels(placement)
    where: dict[str, Any] = {} if labels is None else {"bundle_label_selector": labels}
    group = placement_group([bundle.resources for bundle in placement.bundles], strategy="PACK", name=name, **where)
    ready, end = group.ready(), time.monotonic() + deadline
    with waiting(f"{len(placement.bundles)} bundles of Ray", deadline=deadline, then="the run stops"):
        while not ray.wait([ready], timeout=max(0.0, min(_LOOK, end - time.monotonic())))[0]:
            if time.monotonic() >= end:
                asked, there, free = _sum(placement), ray.cluster_resources(), ray.available_resources()
                remove_placement_group(group)
                raise ConfigError(
                    f"no place for the run within {deadline:.0f} s (--ray-placement-timeout): it asks for"
                    f" {shown(asked)}; the cluster has {shown(there)}, of which {shown(free)} free. Wait for other runs"
                    " to end, or ask for less"
                )
    # Labelled bundles are where the plan has them.
    return Reserved(group, _order(group) if labels is None else list(range(len(labels))))


def _order(group: Any) -> list[int]:
    nodes: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    here = get_node_ip_address()
    # The driver's node first: rank 0 and the rollout are then near the run directory.
    return sorted(
        nodes, key=lambda bundle: (address[nodes[bundle]] != here, address[nodes[bundle]], nodes[bundle], bundle)
    )


def _sum(placement: Placement) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in placement.bundles:
        for name, amount in bundle.resources.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def shown(resources: Mapping[str, float]) -> str:
    """CPUs and GPUs in words."""
    return ", ".join(f"{resources.get(name, 0.0):g} {name}s" for name in ("CPU", "GPU"))
