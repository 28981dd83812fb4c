"""The server groups of one model -> servers with GPUs and arguments, and reserved GPUs.

`planner.make_plan` has one `Filler` per model, each beginning where the one before ended. GPUs are given out in the
file's order, while encoders start first.
"""

from __future__ import annotations

from typing import Any

from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_engine_sglang.arguments import server_arguments
from slime_engine_sglang.environment import find_python, server_environment
from slime_engine_sglang.models_yaml import ModelEntry, ServerGroup
from slime_engine_sglang.placement import Cited, Part, Room, near_multiples
from slime_engine_sglang.plan import ModelPlan, Reservation, ServerPlan, WorkerType


class Filler:
    """Gives the groups of one model their GPUs, in the file's order, and makes servers of them.

    Args:
        args: The run's settings.
        room: The GPUs there are.
        cite: For messages.
        entry: The model.
        start: The first GPU not taken yet, counted from the servers' first.
        rank: Number of the next engine.
    """

    def __init__(self, args: Args, room: Room, cite: Cited, entry: ModelEntry, start: int, rank: int) -> None:
        self._args, self._room, self._cite, self._entry = args, room, cite, entry
        self._python = find_python(args)
        self._path = entry.model_path or args.hf_checkpoint
        self.start, self.rank = start, rank
        self.reserved: list[Reservation] = []
        self._counts: dict[str, int] = {}
        self._encoded = any(group.worker_type == "encoder" for group in entry.server_groups)

    def fill(self, *, updates_weights: bool) -> ModelPlan:
        """The model without its router; `start`, `rank` and `reserved` move on. Raises ConfigError."""
        servers: list[ServerPlan] = []
        for group in self._entry.server_groups:
            if group.worker_type == "placeholder":
                self.reserved += self._reserve(group)
            else:
                servers += self._servers(group, group.worker_type)
        # Stable: encoders first, since the others are told their URLs.
        servers.sort(key=lambda server: server.worker_type != "encoder")
        return ModelPlan(self._entry.name, self._path, updates_weights, tuple(servers), None)

    def _name(self, kind: str) -> str:
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        return f"{self._entry.name}/{number}" if kind == "regular" else f"{self._entry.name}/{kind}-{number}"

    def _reserve(self, group: ServerGroup) -> list[Reservation]:
        name = self._name("placeholder")
        parts = self._room.parts(self.start, group.num_gpus, name, group.where, whole=False)
        self.start += group.num_gpus
        return [Reservation(name, part.node, part.gpus) for part in parts]

    def _servers(self, group: ServerGroup, kind: WorkerType) -> list[ServerPlan]:
        size, named = self._size(group)
        if group.num_gpus % size:
            hint = near_multiples(group.num_gpus, size)
            raise ConfigError(f"{group.where}: num_gpus {group.num_gpus} is no multiple of {named}; {hint}.")
        servers: list[ServerPlan] = []
        for _ in range(group.num_gpus // size):
            name = self._name(kind)
            parts = self._room.parts(self.start, size, name, named)
            servers += [self._server(group, kind, name, size, parts, node) for node in range(len(parts))]
            self.start += size
            self.rank += 1
        return servers

    def _size(self, group: ServerGroup) -> tuple[int, str]:
        if group.num_gpus_per_engine is not None:
            return group.num_gpus_per_engine, f"num_gpus_per_engine {group.num_gpus_per_engine}"
        if self._entry.num_gpus_per_engine is not None:
            size = self._entry.num_gpus_per_engine
            return size, f"num_gpus_per_engine {size} ({self._entry.where})"
        return self._args.rollout_num_gpus_per_engine, self._cite("rollout_num_gpus_per_engine")

    def _server(
        self, group: ServerGroup, kind: WorkerType, name: str, size: int, parts: list[Part], node: int
    ) -> ServerPlan:
        room, told = self._room, self._encoded and kind in ("regular", "prefill")
        forced: dict[str, Any] = {}
        if room.device == "cuda":
            forced |= {"base_gpu_id": parts[node].gpus[0]}
            if self._args.offload_rollout and not room.is_shared(self.start, size):
                forced |= {"enable_memory_saver": False}
        if len(parts) > 1:
            forced |= {"nnodes": len(parts), "node_rank": node}
        if kind in ("prefill", "decode"):
            forced |= {"disaggregation_mode": kind}
        if kind == "decode":
            forced |= {"prefill_round_robin_balance": True}
        if kind == "encoder":
            forced |= {"encoder_only": True}
        if told:
            forced |= {"language_only": True}
        where = f"{group.where}: model {self._entry.name!r}, {kind} group" if group.overrides else ""
        arguments = server_arguments(
            self._args, device=room.device, gpus=size, rank=self.rank, model_path=self._path,
            overrides=group.overrides or None, origin=where, forced=forced,
        )  # fmt: skip
        return ServerPlan(
            name=f"{name}@{node}" if node else name,
            worker_type=kind,
            arguments=arguments,
            gpus=parts[node].gpus,
            environment=server_environment(room.device, arguments, self._python),
            node=parts[node].node,
            node_rank=node,
            num_nodes=len(parts),
            needs_encoder_urls=told,
        )
