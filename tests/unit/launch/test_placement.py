"""Where a run lives: the table of layouts, its agreement with SGLang's own plan, and why some runs fit nowhere."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_engine_http.api.engine import HttpEngine
from slime_engine_sglang import planner, server_groups
from slime_engine_sglang.engine import SglangEngine
from slime_launcher_ray.placement import (
    EngineNeeds,
    Placement,
    engines_of,
    engines_of_flags,
    plan_placement,
    settle_trainer,
)

from slime_core.config import Args, load_settings
from slime_core.errors import ConfigError
from slime_core.protocols.launcher import gpu_layout


def place(gpus: bool = True, num_gpus: int | None = None, num_cpus: float | None = None, **changes: Any) -> Placement:
    args = Args(**changes)
    processes = args.actor_num_nodes * args.actor_num_gpus_per_node
    return plan_placement(
        args,
        trainer_processes=processes,
        engines=engines_of_flags(args, processes, num_gpus),
        gpus=gpus,
        num_gpus=num_gpus,
        num_cpus=num_cpus,
    )


@pytest.mark.parametrize(
    ("changes", "total", "first"),
    [
        ({"rollout_num_gpus": 32}, 48, 16),
        ({"rollout_num_gpus": 32, "debug_train_only": True}, 16, 16),
        ({"rollout_num_gpus": 32, "debug_rollout_only": True}, 32, 0),
        ({"rollout_num_gpus": 8, "colocate": True}, 16, 0),
        ({"rollout_num_gpus": 16, "colocate": True}, 16, 0),
        ({"rollout_num_gpus": 32, "colocate": True}, 32, 0),
        ({"colocate": True}, 16, 0),
        ({"rollout_num_gpus": 0}, 16, 16),
        ({"rollout_num_gpus": 0, "colocate": True}, 16, 0),
        ({"rollout_external_engine_addrs": ["10.0.0.9:30000"]}, 16, 16),
    ],
)
def test_layouts_of_sixteen_training_gpus(changes: dict[str, Any], total: int, first: int) -> None:
    placed = place(actor_num_nodes=2, **changes)
    assert (placed.num_gpus, placed.first_engine) == (total, first)
    assert len(placed.trainers) == (0 if changes.get("debug_rollout_only") else 16)


def test_disaggregated_four_and_four() -> None:
    placed = place(actor_num_gpus_per_node=4, rollout_num_gpus=4, rollout_num_gpus_per_engine=2)
    assert [(t.rank, t.bundle, t.local_rank, t.gpus) for t in placed.trainers] == [(r, r, r, 1.0) for r in range(4)]
    assert [(e.name, e.bundles, e.nodes, e.gpus) for e in placed.engines] == [
        ("engine/0", (4, 5), (0,), 1.0),
        ("engine/1", (6, 7), (0,), 1.0),
    ]
    assert placed.manager.bundle == 4
    assert placed.shared == ()
    assert placed.bundles[0].resources == {"CPU": 1.0, "GPU": 1.0}


def test_cpu_cluster_places_by_cpus() -> None:
    placed = place(gpus=False, actor_num_gpus_per_node=2, rollout_num_gpus=1)
    assert placed.device == "cpu"
    assert [b.resources for b in placed.bundles] == [{"CPU": 1.0}] * 3
    assert placed.engines[0].bundles == (2,)
    assert all(t.gpus == 0 for t in placed.trainers)


def test_fewer_cpus_than_places_are_shared() -> None:
    placed = place(gpus=False, num_cpus=2, actor_num_gpus_per_node=2, rollout_num_gpus=1)
    assert [b.cpus for b in placed.bundles] == [0.666] * 3
    assert "3 processes share 2 CPUs" in placed.warnings[0]


def test_table_for_people() -> None:
    shown = place(actor_num_gpus_per_node=1, num_gpus_per_node=1, rollout_num_gpus=1).describe().splitlines()
    assert shown == [
        "2 GPU places on 2 nodes",
        "  node  GPU  trainer rank  engine    also",
        "  0     0    0             -",
        "  1     0    -             engine/0  rollout manager",
    ]


def test_engines_elsewhere_without_training_take_no_gpu() -> None:
    placed = place(debug_rollout_only=True, rollout_external_engine_addrs=["10.0.0.9:30000"])
    assert placed.num_gpus == 0
    assert placed.manager.bundle == 0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rollout_num_gpus": 4, "num_gpus": 8}, "needs 12 GPUs (8 for training + 4 for inference), and the cluster"),
        ({"rollout_num_gpus": 4, "num_gpus": 8}, "--colocate shares them"),
        ({"rollout_num_gpus": 12, "num_gpus": 8, "colocate": True}, "larger of 8 for training and 12 for inference"),
        ({"rollout_num_gpus": 5, "rollout_num_gpus_per_engine": 2}, "5 GPUs for inference"),
        ({"rollout_num_gpus": 5, "rollout_num_gpus_per_engine": 2}, "4 or 6 works"),
        ({"actor_num_gpus_per_node": 16}, "16 per node, and a node has --num-gpus-per-node 8"),
        ({"actor_num_gpus_per_node": 6, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 4}, "lie across nodes"),
    ],
)
def test_what_fits_nowhere(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        place(**changes)


def test_processes_that_do_not_fill_their_nodes() -> None:
    with pytest.raises(ConfigError, match="3 trainer processes over --actor-num-nodes 2"):
        plan_placement(Args(actor_num_nodes=2), trainer_processes=3, engines=[], gpus=False)


# -- any layout --------------------------------------------------------------------------------------------


@given(
    nodes=st.integers(1, 4),
    per_node=st.integers(1, 8),
    rollout=st.integers(0, 32),
    size=st.sampled_from([1, 2, 4, 8, 16]),
    colocate=st.booleans(),
    gpus=st.booleans(),
    mode=st.sampled_from(["", "debug_train_only", "debug_rollout_only"]),
)
def test_no_gpu_is_given_twice(
    nodes: int, per_node: int, rollout: int, size: int, colocate: bool, gpus: bool, mode: str
) -> None:
    changes: dict[str, Any] = {
        "actor_num_nodes": nodes,
        "actor_num_gpus_per_node": per_node,
        "rollout_num_gpus": rollout // size * size,
        "rollout_num_gpus_per_engine": size,
        "colocate": colocate,
        **({mode: True} if mode else {}),
    }
    try:
        placed = place(gpus, **changes)
    except ConfigError as error:
        if "lie across nodes" not in str(error):
            raise
        return
    trainers = [t.bundle for t in placed.trainers]
    engines = [b for e in placed.engines for b in e.bundles]
    assert len(set(trainers)) == len(trainers) == (0 if mode == "debug_rollout_only" else nodes * per_node)
    assert len(set(engines)) == len(engines) == (0 if mode == "debug_train_only" else changes["rollout_num_gpus"])
    assert bool(set(trainers) & set(engines)) == bool(colocate and trainers and engines)
    everyone = {*trainers, *engines, placed.manager.bundle}
    assert everyone == set(range(len(placed.bundles)))
    for share, most in (("gpus", "gpus"), ("cpus", "cpus")):
        used: Counter[int] = Counter()
        for t in placed.trainers:
            used[t.bundle] += getattr(t, share)
        for e in placed.engines:
            used[e.bundles[0]] += getattr(e, share)
        if share == "cpus":
            used[placed.manager.bundle] += placed.manager.cpus
        assert all(used[b.index] <= getattr(b, most) + 1e-6 for b in placed.bundles)
    if gpus and placed.num_gpus:
        assert all(b.node == b.index // 8 for b in placed.bundles)
        assert len({(t.node, t.local_rank) for t in placed.trainers}) == len(trainers)


# -- the engine's own plan ---------------------------------------------------------------------------------


@pytest.fixture
def without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_groups, "server_arguments", lambda args, **rest: {"tp_size": rest["gpus"]})
    monkeypatch.setattr(server_groups, "server_environment", lambda *_: {})
    monkeypatch.setattr(planner, "router_arguments", lambda args: {})


@pytest.mark.usefixtures("without_sglang")
@pytest.mark.parametrize("gpus", [0, 16])
@pytest.mark.parametrize(
    "flags",
    [
        "--rollout-num-gpus 8",
        "--rollout-num-gpus 8 --colocate",
        "--rollout-num-gpus 16 --colocate --rollout-num-gpus-per-engine 16",
        "--rollout-num-gpus 4 --rollout-num-gpus-per-engine 2",
        "--rollout-num-gpus 16 --debug-rollout-only --rollout-num-gpus-per-engine 4",
        "--rollout-num-gpus 0",
        "--colocate --rollout-num-gpus-per-engine 2",
    ],
)
def test_sglang_plans_the_gpus_that_placement_gives(flags: str, gpus: int) -> None:
    settings = load_settings(["--hf-checkpoint", "/m", *flags.split()], command="show", env={})
    args = settings.args
    settle_trainer(settings, 8)
    engines, warnings = engines_of(SglangEngine, settings, gpus)
    assert not warnings
    planned = plan_placement(args, trainer_processes=8, engines=engines, gpus=gpus > 0, num_gpus=gpus or None)
    if gpus or args.rollout_num_gpus is not None:
        by_flags = engines_of_flags(args, 8, gpus or None)
        own = plan_placement(args, trainer_processes=8, engines=by_flags, gpus=gpus > 0)
        assert [e.bundles for e in planned.engines] == [e.bundles for e in own.engines]
    assert (gpus > 0) == all(e.gpus for e in engines) or not engines
    layout = gpu_layout(args, trainer=8, rollout=sum(e.size for e in engines))
    assert (len(planned.bundles), planned.first_engine) == (layout.total, layout.first_engine)


@pytest.mark.usefixtures("without_sglang")
def test_one_trainer_process_leaves_no_gpus_free() -> None:
    settings = load_settings(["--hf-checkpoint", "/m", "--rollout-num-gpus", "3"], command="show", env={})
    settle_trainer(settings, 1)
    engines, _ = engines_of(SglangEngine, settings, 4)
    placed = plan_placement(settings.args, trainer_processes=1, engines=engines, gpus=True, num_gpus=4)
    assert [e.bundles for e in placed.engines] == [(1,), (2,), (3,)]


def test_engines_without_a_plan() -> None:
    settings = load_settings(["--hf-checkpoint", "/m"], command="show", env={})
    assert engines_of(HttpEngine, settings, 0) == ([], [])
    assert engines_of(None, settings, 0) == ([], [])
    assert engines_of(object, settings, 0) == ([EngineNeeds("engine", 1)], [])
