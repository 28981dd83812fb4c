"""Launch plans of many clusters, and why others cannot be: arithmetic and wording, without SGLang."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_engine_http.plan import LaunchPlan, Reservation
from slime_engine_sglang import planner, server_groups
from slime_engine_sglang.engine import SglangEngine
from slime_engine_sglang.planner import check, make_plan, plan_of

from slime_core.config import Args, load_settings
from slime_core.errors import ConfigError
from tests.sweeps import sweep


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def asked(args: Any, *, forced: Mapping[str, Any], overrides: Mapping[str, Any] | None, **rest: Any) -> dict[str, Any]:
    """What the planner asks `server_arguments` for, in place of what the installed SGLang makes of it."""
    return {**{k: rest[k] for k in ("gpus", "rank", "model_path")}, **(overrides or {}), **forced}


@pytest.fixture(autouse=True)
def without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_groups, "server_arguments", asked)
    monkeypatch.setattr(server_groups, "server_environment", lambda device, *_: {"ON": device})
    monkeypatch.setattr(planner, "router_arguments", lambda args: {"policy": "round_robin"})


def make(flags: str = "", gpus: int = 0, *, yaml: str | None = None, command: str = "show") -> LaunchPlan:
    """The plan of these flags for `gpus` GPUs; 0 is a machine without."""
    if yaml is not None:
        Path("m.yaml").write_text(yaml)
        flags += " --sglang-config m.yaml"
    settings = load_settings(["--hf-checkpoint", "/m", *flags.split()], command=command, env={})
    return plan_of(settings, num_gpus=gpus)


def rows(plan: LaunchPlan) -> list[tuple[str, str, int, tuple[int, ...]]]:
    return [(s.name, s.worker_type, s.node, s.gpus) for s in plan.servers]


ALONE = "--actor-num-gpus-per-node 1 --colocate"
"""Servers begin at GPU 0."""


# -- golden plans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "gpus", "first"),
    [  # THUDM/slime's table of placements, with 16 GPUs for training and 32 for inference
        ("", 48, 16),
        ("--debug-rollout-only --rollout-max-response-len 4", 32, 0),
        ("--colocate", 32, 0),
    ],
)
def test_layout(flags: str, gpus: int, first: int) -> None:
    plan = make(f"--actor-num-nodes 2 --rollout-num-gpus 32 --rollout-num-gpus-per-engine 8 {flags}", gpus)
    assert [(s.node, s.gpus) for s in plan.servers] == [(first // 8 + i, tuple(range(8))) for i in range(4)]


TWO_MODELS = """
sglang:
  - name: actor
    server_groups: [{num_gpus: 4, num_gpus_per_engine: 2}]
  - name: judge
    model_path: /j
    num_gpus_per_engine: 4
    server_groups: [{num_gpus: 4, overrides: {mem_fraction_static: 0.5}}]
"""


def test_actor_and_frozen_judge() -> None:
    plan = make("--actor-num-gpus-per-node 4 --num-gpus-per-node 12 --rollout-num-gpus 8", gpus=12, yaml=TWO_MODELS)
    actor, judge = plan.models
    assert (actor.updates_weights, judge.updates_weights, plan.main) == (True, False, actor)
    assert (actor.model_path, judge.model_path) == ("/m", "/j")
    assert rows(plan) == [
        ("actor/0", "regular", 0, (4, 5)),
        ("actor/1", "regular", 0, (6, 7)),
        ("judge/0", "regular", 0, (8, 9, 10, 11)),
    ]
    assert judge.servers[0].arguments["mem_fraction_static"] == 0.5
    assert [s.arguments["rank"] for s in plan.servers] == [0, 1, 2]
    assert actor.router is not None
    assert judge.router is not None
    lora = "--lora-rank 12 --lora-adapters a b --lora-unmerged --actor-num-gpus-per-node 4 --num-gpus-per-node 12"
    plan = make(f"{lora} --rollout-num-gpus 8", gpus=12, yaml=TWO_MODELS)
    told = [{k: v for k, v in s.arguments.items() if "lora" in k} for m in plan.models for s in m.servers]
    assert told[0] == told[1] == {
        "enable_lora": True, "max_lora_rank": 12, "max_loras_per_batch": 4,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    }  # fmt: skip
    assert told[2] == {}, "a judge has no adapters"


def test_a_model_of_placeholders_is_none_that_serves() -> None:
    text = (
        "sglang:\n- {name: later, server_groups: [{num_gpus: 2, worker_type: placeholder}]}\n"
        "- {name: a, server_groups: [{num_gpus: 2}]}\n"
    )
    plan = make(ALONE, gpus=4, yaml=text)
    (a,) = plan.models
    assert a.updates_weights
    assert plan.reserved == (Reservation("later/placeholder-0", 0, (0, 1)),)
    assert "reserved\n  later/placeholder-0  node 0  GPUs 0-1" in plan.describe()
    assert [s.gpus for s in a.servers] == [(2,), (3,)]


# -- weights -----------------------------------------------------------------------------------------------


ONE = "sglang:\n- name: a\n  server_groups: [{}]\n"


def two(first: str, second: str) -> str:
    groups = "server_groups: [{num_gpus: 1}]"
    return f"sglang:\n- {{name: a, {groups}{first}}}\n- {{name: b, {groups}{second}}}\n"


@pytest.mark.parametrize(
    ("first", "second", "receiver", "main", "warned"),
    [
        ("", ", model_path: /j", "a", "a", False),
        (", model_path: /j", "", "b", "b", False),
        (", model_path: /j", ", model_path: /m/", "b", "b", False),
        (", update_weights: false", "", "b", "b", False),
        (", model_path: /j, update_weights: true", ", update_weights: false", "a", "a", False),
        (", model_path: /j", ", update_weights: false", None, "a", False),
        ("", "", "a", "a", True),
    ],
)
def test_who_receives_weights(first: str, second: str, receiver: str | None, main: str, warned: bool) -> None:
    plan = make(yaml=two(first, second))
    assert [m.name for m in plan.models if m.updates_weights] == ([receiver] if receiver else [])
    assert plan.main.name == main
    assert len(plan.warnings) == warned
    assert not warned or re.match("m.yaml:3: model 'b' keeps its first weights", plan.warnings[0])


# -- routers, and servers that run already --------------------------------------------------------------------


def test_a_router_that_runs_is_for_the_main_model() -> None:
    plan = make("--sglang-router-ip h --sglang-router-port 9", yaml=two(", model_path: /j", ""))
    a, b = plan.models
    assert (a.router, a.router_address) == ({"policy": "round_robin"}, None)
    assert (b.router, b.router_address) == (None, ("h", 9))
    assert "h:9, already running" in plan.describe()


def test_a_router_with_a_port_or_none_and_servers_or_none() -> None:
    plan = make("--rollout-num-gpus 0 --sglang-router-port 9", gpus=8)
    assert (plan.servers, plan.models[0].router) == ((), {"policy": "round_robin", "port": 9})
    plan = make("--no-engine-router")
    assert (rows(plan), plan.device, plan.models[0].router) == ([("default/0", "regular", 0, ())], "cpu", None)


def test_external_engines_leave_only_the_router_to_start() -> None:
    plan = make("--rollout-external-engine-addrs h:1 h:2", gpus=8)
    (model,) = plan.models
    assert (model.servers, model.external, model.updates_weights) == ((), ("h:1", "h:2"), True)
    assert model.router is not None
    assert make("--rollout-external-engine-addrs h:1 --rollout-num-gpus 2").warnings == (
        "--rollout-num-gpus 2 (flag) has no effect with --rollout-external-engine-addrs 'h:1' (flag)",
    )


# -- GPUs that are not told ---------------------------------------------------------------------------------


def test_without_rollout_num_gpus_servers_take_what_the_trainer_leaves() -> None:
    assert [s.gpus for s in make("--actor-num-gpus-per-node 6", gpus=8).servers] == [(6,), (7,)]
    plan = make(gpus=2)
    assert [s.gpus for s in plan.servers] == [(0,), (1,)]
    assert "--actor-num-gpus-per-node 8 (default): the servers share them" in plan.warnings[0]


@pytest.mark.parametrize("command", ["rollout", "eval"])
def test_commands_that_train_nothing_leave_every_gpu_to_inference(command: str) -> None:
    flags = "--prompt-data d --eval-prompt-data d d --rollout-batch-size 1 --rm-type math --rollout-max-response-len 4"
    plan = make(f"{flags} --eval-max-response-len 4 --rollout-num-gpus 2", gpus=2, command=command)
    assert ([s.gpus for s in plan.servers], plan.warnings) == ([(0,), (1,)], ())


# -- refusals ----------------------------------------------------------------------------------------------

REFUSED = [
    ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", 0, None, "--rollout-num-gpus 3 .*2 or 4 works"),
    ("--colocate --rollout-num-gpus-per-engine 2", 7, None, "7 GPUs for inference .*6 or 8 works"),
    ("--rollout-num-gpus 4", 8, None, "--rollout-num-gpus 4 .*--actor-num-nodes 1 "),
    ("--colocate --rollout-num-gpus 16", 8, None, "--rollout-num-gpus 16 .*8 are visible"),
    ("--device cuda", 0, None, "--device cpu, or look at CUDA_VISIBLE_DEVICES"),
    ("--colocate --rollout-num-gpus 9 --rollout-num-gpus-per-engine 3", 16, None, "6 to 8 .*--num-gpus-per-node 8"),
    ("--rollout-num-gpus 2 --prefill-num-servers 2", 0, None, "--prefill-num-servers 2 .*there are 2 GPUs"),
    ("--rollout-num-gpus 0 --prefill-num-servers 1", 0, None, "--rollout-num-gpus 0 .*--prefill-num-servers 1"),
    ("--rollout-num-gpus 0 --no-engine-router", 0, None, "--no-engine-router .*starts nothing"),
    ("--rollout-num-gpus 2 --prefill-num-servers 1 --no-engine-router", 0, None, "--no-engine-router .*only a router"),
    ("--sglang-config m.yaml --prefill-num-servers 1", 0, None, "--sglang-config .*--prefill-num-servers 1 .*exclude"),
    ("--sglang-config m.yaml --rollout-external-engine-addrs h:1", 0, None, "engine-addrs .*--sglang-config .*exclude"),
    ("--sglang-router-ip h", 0, None, "--sglang-router-ip 'h' .*--sglang-router-port N"),
    ("--sglang-router-port 9 --no-engine-router", 0, None, "--no-engine-router .*--sglang-router-port 9"),
    ("--rollout-num-gpus 3", 0, two("", ""), "--sglang-config 'm.yaml' .*have 2 GPUs together"),
    ("--colocate", 1, two("", ""), "--sglang-config 'm.yaml' .*needs 2 GPUs, but 1 are visible"),
    ("", 0, ONE.format("{num_gpus: 3, num_gpus_per_engine: 2}"), "m.yaml:3: num_gpus 3 .*2 or 4 works"),
    ("--rollout-num-gpus-per-engine 4", 0, ONE.format("num_gpus: 2"), "m.yaml:3: .*gpus-per-engine 4 .*4 works"),
]
"""Flags, visible GPUs, a file, and what the error names."""


@sweep("flags, gpus, yaml, message", REFUSED)
def test_refused(flags: str, gpus: int, yaml: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(flags, gpus, yaml=yaml)


def test_a_model_needs_a_path() -> None:
    Path("m.yaml").write_text(two(", model_path: /m", ""))
    for flags, message in ((["--sglang-config", "m.yaml"], r"m.yaml:3: model 'b' .*--hf-checkpoint"), ([], "--hf-ch")):
        with pytest.raises(ConfigError, match=message):
            plan_of(load_settings(flags, command="show", env={}), num_gpus=0)


# -- what a run on this machine is told ------------------------------------------------------------------------

TRAIN = (
    "--hf-checkpoint /m --prompt-data d --rollout-batch-size 1 --num-rollout 1 --rm-type math"
    " --rollout-max-response-len 4 --device cpu"
)


def checked(flags: str, yaml: str | None = None) -> list[str]:
    if yaml is not None:
        Path("m.yaml").write_text(yaml)
        flags += " --sglang-config m.yaml"
    settings = load_settings(f"{TRAIN} {flags}".split(), command="train", env={})
    warnings = check(settings)
    assert SglangEngine.launch_plan(settings, 0) == plan_of(settings, num_gpus=0)
    return warnings


def test_training_needs_a_model_that_receives_weights() -> None:
    frozen = two(", model_path: /j", ", update_weights: false")
    with pytest.raises(ConfigError, match=r"--sglang-config 'm.yaml' .*\(a, b\) receives the trainer's weights"):
        checked("", frozen)
    assert checked("--debug-rollout-only", frozen) == []


def test_other_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "find_device", lambda setting, num_gpus=None: ("cuda", 16))
    with pytest.raises(ConfigError, match=r"2 nodes of --num-gpus-per-node 8 .*--rollout-external-engine-addrs"):
        checked("--rollout-num-gpus 8")
    settings = load_settings(f"{TRAIN} --rollout-num-gpus 8 --num-gpus-per-node 16".split(), command="train", env={})
    assert check(settings) == []


# -- every plan --------------------------------------------------------------------------------------------


@st.composite
def clusters(draw: st.DrawFn) -> tuple[int, int, list[list[tuple[str, int, int]]]]:
    """GPUs per node, trainer's GPUs, and models with groups of (kind, engine size, engines)."""
    per_node = draw(st.sampled_from([1, 2, 4, 8]))
    sizes = st.sampled_from([s for s in (1, 2, 4, 8, 16) if s <= per_node or s % per_node == 0])
    pick = st.tuples(sizes, st.integers(1, 3))
    models = []
    for _ in range(draw(st.integers(1, 3))):
        serving = ["prefill", "decode"] if draw(st.booleans()) else ["regular"]
        kinds = draw(
            st.permutations([*serving, *draw(st.lists(st.sampled_from(["encoder", "placeholder"]), max_size=2))])
        )
        models.append([(kind, *draw(pick)) for kind in kinds])
    return per_node, draw(st.integers(0, 3)) * per_node * 16, models


@given(clusters())
def test_every_gpu_belongs_to_one_server(cluster: tuple[int, int, list[list[tuple[str, int, int]]]]) -> None:
    per_node, trainer, models = cluster
    entries = [
        {
            "name": f"m{i}",
            "update_weights": i == 0,
            "server_groups": [
                {"worker_type": k, "num_gpus": 16 * n}
                | ({} if k == "placeholder" else {"num_gpus_per_engine": min(s, 16)})
                for k, s, n in groups
            ],
        }
        for i, groups in enumerate(models)
    ]
    total = sum(g["num_gpus"] for e in entries for g in e["server_groups"])  # type: ignore[attr-defined]
    Path("m.yaml").write_text(json.dumps({"sglang": entries}))
    args = Args(hf_checkpoint="/m", sglang_config="m.yaml", num_gpus_per_node=per_node, rollout_num_gpus=total)
    args.actor_num_gpus_per_node, args.colocate = trainer, not trainer
    plan = make_plan(args, device="cuda", num_gpus_visible=trainer + total)
    taken = [(s.node * per_node + g) for s in plan.servers for g in s.gpus]
    held = [(r.node * per_node + g) for r in plan.reserved for g in r.gpus]
    assert sorted(taken + held) == list(range(trainer, trainer + total))
    for entry, model in zip(entries, plan.models, strict=True):
        engines: dict[str, list[Any]] = {}
        for server in model.servers:
            engines.setdefault(server.engine, []).append(server)
        for parts in engines.values():
            size = parts[0].arguments["gpus"]
            assert sum(len(p.gpus) for p in parts) == size
            assert [p.node_rank for p in parts] == list(range(len(parts)))
            assert {p.num_nodes for p in parts} == {len(parts)} == {max(1, size // per_node)}
            assert [p.node for p in parts] == list(range(parts[0].node, parts[0].node + len(parts)))
            assert all(p.arguments["base_gpu_id"] == p.gpus[0] for p in parts)
        asked_for = sum(g["num_gpus"] for g in entry["server_groups"] if g["worker_type"] != "placeholder")  # type: ignore[attr-defined]
        assert sum(len(s.gpus) for s in model.servers) == asked_for
    ranks = {s.engine: s.arguments["rank"] for s in plan.servers}
    assert sorted(ranks.values()) == list(range(len(ranks)))


# -- for people --------------------------------------------------------------------------------------------


def test_a_plan_is_described_and_is_json() -> None:
    plan = make("--actor-num-gpus-per-node 4 --num-gpus-per-node 12", gpus=12, yaml=TWO_MODELS)
    text = plan.describe()
    for line in (
        "3 servers on cuda",
        "model actor: /m (receives the trainer's weights)",
        "  actor/1  regular  0     6-7   rank=1 base_gpu_id=6",
        "model judge: /j (keeps its weights)",
        "  with: gpus=4 rank=2 model_path=/j mem_fraction_static=0.5 base_gpu_id=8",
    ):
        assert line in text.splitlines()
    assert json.loads(json.dumps(plan.to_dict()))["models"][1]["servers"][0]["gpus"] == [8, 9, 10, 11]


def test_the_files_of_the_page_have_plans() -> None:
    page = Path(__file__).parents[4] / "docs" / "engines" / "sglang-config.md"
    files = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    plan = make("--colocate --num-gpus-per-node 12", gpus=12, yaml=files[0])
    assert [(m.name, len(m.servers), m.updates_weights) for m in plan.models] == [
        ("actor", 3, True),
        ("judge", 2, False),
    ]
    for text in files[1:]:
        plan = make("--rollout-num-gpus 2", yaml=text)
        assert [(len(m.servers), m.updates_weights) for m in plan.models] == [(1, True), (1, False)]
