"""What the rollout actor shows to SGLang's servers: ordinals of the plan are those of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from typing import Any

import pytest
from slime_launcher_ray.gpus import SeenGpu, visible_to_servers
from slime_launcher_ray.placement import EngineNeeds, Placement, plan_placement
from slime_launcher_ray.placing import check_one_node

from slime_core.config import Args
from slime_core.errors import ConfigError


class _Starts:
    """Of an engine that starts servers."""

    launch_plan = None


def _placement(trainer: int, engines: list[EngineNeeds], **changes: Any) -> Placement:
    args = Args(**{"actor_num_gpus_per_node": trainer, **changes})
    return plan_placement(args, trainer_processes=trainer * args.actor_num_nodes, engines=engines, gpus=True)


def test_a_bundle_is_its_ordinal() -> None:
    placement = _placement(2, [EngineNeeds("e0", 2), EngineNeeds("e1", 1)], num_gpus_per_node=8)
    # As Ray would number them where others have GPUs 0 and 3.
    seen = {bundle: SeenGpu("node-a", gpu) for bundle, gpu in enumerate(["5", "1", "7", "2", "6"])}
    visible = visible_to_servers(placement, seen, "node-a").split(",")
    assert [visible[bundle] for bundle in placement.engines[0].bundles] == ["7", "2"]
    assert [visible[bundle] for bundle in placement.engines[1].bundles] == ["6"]


def test_engines_on_the_second_node() -> None:
    placement = _placement(2, [EngineNeeds("e0", 2)], num_gpus_per_node=2)
    seen = {b: SeenGpu("node-a" if b < 2 else "node-b", str(b % 2)) for b in range(4)}
    assert visible_to_servers(placement, seen, "node-b") == "0,1"
    with pytest.raises(ConfigError, match="places 2, 3 of the run on another node"):
        visible_to_servers(placement, seen, "node-a")


def test_colocated() -> None:
    placement = _placement(4, [EngineNeeds("e0", 4)], colocate=True, num_gpus_per_node=4)
    seen = {b: SeenGpu("node-a", str(3 - b)) for b in range(4)}
    assert visible_to_servers(placement, seen, "node-a") == "3,2,1,0"


def test_servers_on_two_nodes_are_refused() -> None:
    placement = _placement(2, [EngineNeeds("e0", 2), EngineNeeds("e1", 2)], num_gpus_per_node=2)
    with pytest.raises(ConfigError, match="engines would lie on nodes 1, 2, and the rollout starts servers on its own"):
        check_one_node(_Starts, placement)
    check_one_node(object, placement)
