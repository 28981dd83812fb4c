"""Create the actors of a run, introduce and compare them, build them in parallel, and end all of them.

    Actors.assemble   empty actors -> logs and addresses -> same code everywhere? -> rollout stage, then trainer ranks
    Actors.close      engine, workers and process groups end by themselves; then every actor is killed

If building an actor fails, the run fails with the actor's error, and `close` ends the other actors. `launcher` uses
`end_ranks` and `replace_ranks`.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from slime_runs.board import remove_board
from slime_runs.processes import runs

from slime_core.checkpoint.run_dir import run_dir_of
from slime_core.errors import EngineError, RolloutError, SlimeError, TrainError
from slime_core.launch.prepare import Prepared
from slime_core.protocols import EngineTraits, traits_of
from slime_launcher_ray.carried import Carried
from slime_launcher_ray.engine_actor import EngineActor
from slime_launcher_ray.fingerprint import check_same_code, fingerprint
from slime_launcher_ray.gpus import SeenGpu, seen_by_tasks, visible_to_servers
from slime_launcher_ray.placement import Placement
from slime_launcher_ray.placing import Reserved, cluster_gpus
from slime_launcher_ray.remote_stages import relay_last, stopped
from slime_launcher_ray.rollout_actor import RolloutActor
from slime_launcher_ray.shared_paths import remove_tokens, write_token
from slime_launcher_ray.shell import FOLDER, Order, end_quietly, log_of
from slime_launcher_ray.trainer_actor import TrainerActor
from slime_launcher_ray.wait import (
    BUCKETS,
    CONTROL,
    EVALUATION,
    TURNS,
    WEIGHTS,
    WORK,
    EngineGone,
    Member,
    TrainerDied,
    gather,
)

_LANES = {WORK: 1, TURNS: 1, CONTROL: 2, BUCKETS: 1, WEIGHTS: 1, EVALUATION: 1}
_ENGINE_LANES = {CONTROL: 2, BUCKETS: 1}
_AT_ONCE = 100_000
"""Maximum number of concurrent requests of an engine actor."""
_NUMBERS = itertools.count()
_ASK = 10.0
"""Seconds for an answer during shutdown."""
_GONE = 30.0
"""Seconds for the processes of killed actors on this host to end."""


@dataclass
class Actors:
    """The actors of a run."""

    rollout: Member
    ranks: list[Member]
    engine: Member | None = None
    carried: Carried | None = None
    """Files that Ray copies to the nodes."""
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> facts returned by the actor's `open`."""

    @property
    def members(self) -> list[Member]:
        """Return all actors."""
        return [*self.ranks, self.rollout, *([self.engine] if self.engine is not None else [])]

    @classmethod
    def create(cls, run: Prepared, placement: Placement, reserved: Reserved, carried: Carried | None = None) -> Actors:
        """Create empty actors in their places; `carried` are files that Ray copies to the nodes."""
        make = _Maker(run, reserved, carried)
        manager = placement.manager
        rollout = make(RolloutActor, "rollout", RolloutError, (manager.bundle, manager.cpus, 0.0), _LANES)
        engine = None
        if has_own_process(run.parts.engine) and placement.engines:
            place = placement.engines[0]
            where = (place.bundles[0], place.cpus, place.gpus)
            restarts = -1 if run.args.use_fault_tolerance else 0  # `EngineRestart` counts
            engine = make(
                EngineActor, "engine", EngineError, where, _ENGINE_LANES,
                max_concurrency=_AT_ONCE, max_restarts=restarts,
            )  # fmt: skip
            engine.death = EngineGone
        return cls(rollout, _make_ranks(make, run, placement), engine, carried)

    def assemble(
        self, run: Prepared, placement: Placement, reserved: Reserved, start_rollout_id: int, *, tell_groups: bool
    ) -> None:
        """Do all steps before the first call of the loop.

        Raises:
            ConfigError: A node lacks the run's directories, or has different code.
            SlimeError: Loading the data or a model failed.
        """
        self._introduce(self.members, run, placement)
        self._show_gpus(run, placement, reserved)
        args = run.args
        facts = self.facts[self.engine.name] if self.engine is not None else None
        length = self.rollout.call("build", self.engine, tell_groups, facts, self._several_nodes)
        args.num_rollout = length if args.num_rollout is None else args.num_rollout
        references = [r.submit("build", args.num_rollout, start_rollout_id, self.rollout) for r in self.ranks]
        gather(self.ranks, references, "loading the models")

    def end_ranks(self) -> None:
        """Kill the remaining trainer ranks."""
        self._end(self.ranks)

    def _show_gpus(self, run: Prepared, placement: Placement, reserved: Reserved) -> None:
        """Set the rollout actor's visible GPUs, if its engine starts servers there; Ray gives this actor no GPU."""
        if placement.device != "cuda" or self.engine is not None or not placement.engines:
            return
        seen = seen_by_tasks(placement, reserved)
        for place, rank in zip(placement.trainers, self.ranks):
            facts = self.facts[rank.name]
            seen[place.bundle] = SeenGpu(facts["node"], facts["gpus"][0])
        visible = visible_to_servers(placement, seen, self.facts[self.rollout.name]["node"])
        self.rollout.call("set_environment", {"CUDA_VISIBLE_DEVICES": visible})

    def replace_ranks(self, run: Prepared, placement: Placement, reserved: Reserved, start_rollout_id: int) -> None:
        """Start new trainer ranks in place of those that `end_ranks` killed; update the list that stand-ins share.

        Raises:
            TrainerDied: A new rank died.
            TrainError: A node is lost permanently.
        """
        while True:
            reserved.wait_for_nodes(run.args.ray_placement_timeout)
            self.ranks[:] = _make_ranks(_Maker(run, reserved, self.carried), run, placement)
            try:
                self._introduce(self.ranks, run, placement)
                break
            except TrainerDied:
                if reserved.complete:
                    raise
                self.end_ranks()  # they never ran: Ray notices only now that the node is lost
        build = [r.submit("build", run.args.num_rollout, start_rollout_id, self.rollout, True) for r in self.ranks]
        gather(self.ranks, build, "loading the models again")

    def _introduce(self, members: list[Member], run: Prepared, placement: Placement) -> None:
        """Exchange logs, addresses and ranks; then check that every actor has the driver's code."""
        self.facts |= dict(zip([m.name for m in members], _all(members, "open")))
        remove_tokens(run_dir_of(run.args) / FOLDER)
        for member in members:
            known = self.facts[member.name]
            member.place = f"{known['host']} ({known['ip']}, node {known['node'][:8]})"
        if self.engine in members and self._several_nodes:
            own = {"SLIME_HOST_IP": self.facts[self.engine.name]["ip"]}  # other programs may call it over HTTP
            self.engine.call("set_environment", own)
        self._set_environment(placement)
        theirs = [(m.name, self.facts[m.name]["host"], found) for m, found in zip(members, _all(members, "prepare"))]
        check_same_code(fingerprint(run.plugins), theirs)

    def _set_environment(self, placement: Placement) -> None:
        """Set torchrun's environment variables on every rank: ranks, sizes, and the address of rank 0."""
        places, count = placement.trainers, len(self.ranks)
        port = self.ranks[0].call("free_port")
        address = self.facts[self.ranks[0].name]["ip"]
        # Ray's actual placement: without GPUs the plan does not know which ranks share a node.
        nodes = [self.facts[rank.name]["node"] for rank in self.ranks]
        numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        references = []
        for index, (rank, place) in enumerate(zip(self.ranks, places)):
            node = nodes[index]
            here = nodes.count(node)
            # An actor with its own GPU sees only this GPU.
            local = (0, 1) if place.gpus else (nodes[:index].count(node), here)
            variables = {
                "RANK": place.rank,
                "WORLD_SIZE": count,
                "LOCAL_RANK": local[0],
                "LOCAL_WORLD_SIZE": local[1],
                "NODE_RANK": numbers[node],
                "GROUP_RANK": numbers[node],
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
            }
            words = {name: str(value) for name, value in variables.items()}
            references.append(rank.submit("set_place", words, here))
        gather(self.ranks, references, "set_place")

    @property
    def _several_nodes(self) -> bool:
        return len({facts["node"] for facts in self.facts.values()}) > 1

    def _newest_engine(self) -> None:
        """Update the facts of the engine's actor, if it was restarted."""
        facts = ray.get(self.rollout.submit("engine_facts", group=CONTROL), timeout=_ASK) if self.engine else None
        if self.engine is not None and facts is not None:
            self.facts[self.engine.name] = dict(facts)

    def close(self) -> None:
        """End the processes that the actors have started, then the actors; safe to call twice and in any state."""
        end_quietly(lambda: relay_last(self.members))
        end_quietly(self._newest_engine)
        end_quietly(lambda: stopped([self.rollout], "stop"))
        self._end(self.members)

    def _end(self, members: list[Member]) -> None:
        for member in members:
            end_quietly(lambda member=member: ray.kill(member.handle, no_restart=True))  # type: ignore[misc]
        here = socket.gethostname()
        facts = [self.facts[member.name] for member in members if member.name in self.facts]
        pids = [known["pid"] for known in facts if known["host"] == here]
        end = time.monotonic() + _GONE
        while any(map(runs, pids)) and time.monotonic() < end:
            time.sleep(0.02)
        for known in facts:
            remove_board(Path(known["log"]).parents[1], known["host"], known["pid"])


def has_own_process(engine: Any) -> bool:
    """Return True if the engine's class runs in its own process and so gets an actor; others are clients of servers."""
    return engine is not None and not traits_of(engine, EngineTraits).runs_elsewhere


def _make_ranks(make: _Maker, run: Prepared, placement: Placement) -> list[Member]:
    environment = {name: str(value) for name, value in run.args.train_env_vars.items()}
    options = {"runtime_env": {"env_vars": environment}} if environment else {}
    ranks = [
        make(TrainerActor, f"trainer rank {p.rank}", TrainError, (p.bundle, p.cpus, p.gpus), _LANES, **options)
        for p in placement.trainers
    ]
    for rank in ranks:
        rank.death = TrainerDied
    return ranks


def _all(members: list[Member], method: str) -> list[Any]:
    return gather(members, [member.submit(method) for member in members], method)


class _Maker:
    """A factory of actors."""

    def __init__(self, run: Prepared, reserved: Reserved, carried: Carried | None = None) -> None:
        self._run = run
        self._reserved = reserved
        self._run_dir = run_dir_of(run.args).absolute()
        token = write_token(self._run_dir / FOLDER)
        order = Order.of(run.settings, self._run_dir, carried, token)
        if run.args.device != "cpu":
            order = dataclasses.replace(
                order, environment={**order.environment, "SLIME_CLUSTER_GPUS": str(cluster_gpus(run.args))}
            )
        self._order = order  # by value: Ray restarts an engine with the same arguments

    def __call__(
        self,
        actor_class: type,
        name: str,
        error: type[SlimeError],
        where: tuple[int, float, float],
        lanes: dict[str, int],
        **options: Any,
    ) -> Member:
        options = {"max_restarts": 0, **options, **self._reserved.options(*where)}
        as_actor: Any = ray.remote  # its type does not declare concurrency groups
        remote = as_actor(concurrency_groups=lanes)(actor_class)
        label = f"{self._run_dir.name} {name} of {os.getpid()} ({next(_NUMBERS)})"
        handle = remote.options(name=label, **options).remote(self._order, name)
        silence = self._run.args.distributed_timeout_minutes * 60.0
        return Member(name, handle, error, log_of(Path(self._run_dir), name), silence, frozenset(lanes))
