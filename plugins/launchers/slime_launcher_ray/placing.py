"""Reserve a Ray placement group for a `Placement`, with a deadline, and place each actor in it.

The launcher calls `plan`, then `reserve`, before any actor exists. Ray numbers bundles in the order of the request and
places them on any nodes. The bundles of the plan are therefore assigned in the order of nodes, so that ranks that the
plan has on the same node are on the same node.
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
"""Seconds between checks while waiting."""
_NODE_LABEL = "ray.io/node-id"


def plan(run: Prepared) -> Placement:
    """Place the run on the cluster that this process has joined.

    Raises:
        ConfigError: The run does not fit; the message shows the arithmetic.
    """
    args, there = run.args, ray.cluster_resources()
    num_gpus, num_cpus = int(there.get("GPU", 0)), float(there.get("CPU", 0))
    if args.device == "cuda" and not num_gpus:
        raise ConfigError(f"{run.settings.cite('device')}: the Ray cluster has no GPU ({shown(there)})")
    gpus = args.device != "cpu" and num_gpus > 0
    if gpus:
        settle_trainer(run.settings, run.processes)
    engines, warnings = engines_of(run.parts.engine, run.settings, num_gpus if gpus else 0)
    if args.device != "cpu":  # on CPU they were logged before the cluster was known
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
    """Return the number of GPUs that the run may use, over all nodes of the joined cluster."""
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
    """Raise ConfigError if a CPU run needs more nodes than there are: its bundles alone do not enforce nodes."""
    wanted, there = _trainer_nodes(placement), len(_nodes())
    if placement.device == "cpu" and wanted > there:
        raise ConfigError(
            f"--actor-num-nodes {args.actor_num_nodes}: the Ray cluster has {there} node{'s' * (there != 1)}"
        )


def _trainer_nodes(placement: Placement) -> int:
    return len({trainer.node for trainer in placement.trainers})


def _nodes() -> list[dict[str, Any]]:
    """Return the cluster's live nodes: this process's node first, then by descending number of CPUs."""
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    return sorted(alive, key=lambda n: (n["NodeID"] != here, -n["Resources"]["CPU"], n["NodeID"]))


def _labels(placement: Placement) -> list[dict[str, str]] | None:
    """Return labels that bind bundles to nodes; None if Ray's packing is enough, since GPUs fill up the nodes."""
    if placement.device == "cuda" or _trainer_nodes(placement) < 2:
        return None
    ids = [node["NodeID"] for node in _nodes()]
    of_bundle = {trainer.bundle: {_NODE_LABEL: ids[trainer.node]} for trainer in placement.trainers}
    return [of_bundle.get(bundle.index, {}) for bundle in placement.bundles]


@dataclass
class Reserved:
    """A reserved placement group."""

    group: Any
    order: list[int]
    """Bundle of the plan -> bundle of the group."""

    def options(self, bundle: int, cpus: float, gpus: float) -> dict[str, Any]:
        """Return Ray options of an actor in the plan's bundle number `bundle`."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.order[bundle])
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}

    @property
    def complete(self) -> bool:
        """True if all bundles exist, according to Ray."""
        return bool(placement_group_table(self.group)["state"] == "CREATED")

    def wait_for_nodes(self, deadline: float) -> None:
        """Wait until all bundles exist, which fails only after the loss of a node. Raises TrainError."""
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
        """Release the bundles."""
        remove_placement_group(self.group)


def reserve(placement: Placement, name: str, deadline: float) -> Reserved:
    """Wait until Ray has all bundles.

    Args:
        placement: The plan.
        name: Name of the placement group in Ray's own tools.
        deadline: Seconds to wait; other runs on the cluster may have to end first.

    Raises:
        ConfigError: The bundles did not come in time; the message lists the requested, total and free resources.
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
    """Return the CPUs and GPUs as text."""
    return ", ".join(f"{resources.get(name, 0.0):g} {name}s" for name in ("CPU", "GPU"))
