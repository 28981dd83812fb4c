"""Turn the server groups of the models into servers with GPUs and arguments, and reserve GPUs for placeholders.

`planner.make_plan` passes the models in their order to one `Filler` for the whole plan. GPUs are assigned in the order
of the file, but encoders start first.
"""

from __future__ import annotations

from collections import Counter

from slime_engine_http.placement import Cited, Room, near_multiples
from slime_engine_http.plan import ModelPlan, Reservation, ServerPlan, WorkerType

from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_engine_sglang.adapters import server_fields as lora_fields
from slime_engine_sglang.arguments import server_arguments
from slime_engine_sglang.environment import find_python, server_environment
from slime_engine_sglang.models_yaml import ModelEntry, ServerGroup


class Filler:
    """Assign GPUs to groups, one after the other, and plan their servers."""

    def __init__(self, args: Args, room: Room, cite: Cited) -> None:
        """Create the filler; `cite` names settings in messages."""
        self._args, self._room, self._cite = args, room, cite
        self._python = find_python(args)
        self._start = 0
        """Index of the first free GPU, counted from the servers' first GPU."""
        self._rank = 0
        """Number of the next engine."""
        self.reserved: list[Reservation] = []
        """GPUs reserved by placeholders so far."""

    def fill(self, entry: ModelEntry, *, updates_weights: bool) -> ModelPlan:
        """Return the plan of a model without its router. Raises ConfigError."""
        servers: list[ServerPlan] = []
        counts: Counter[str] = Counter()
        for group in entry.server_groups:
            kind = group.worker_type
            size, named = self._size(entry, group)
            for _ in range(group.num_gpus // size):
                number = f"{kind}-{counts[kind]}" if kind != "regular" else str(counts[kind])
                name = f"{entry.name}/{number}"
                counts[kind] += 1
                parts = self._room.parts(self._start, size, name, named, whole=kind != "placeholder")
                if kind == "placeholder":
                    self.reserved += parts
                else:
                    servers += [
                        self._server(entry, group, kind, size, parts, node, updates_weights=updates_weights)
                        for node in range(len(parts))
                    ]
                    self._rank += 1
                self._start += size
        # A stable sort: encoders first, since other servers get their URLs as arguments.
        servers.sort(key=lambda server: server.worker_type != "encoder")
        path = entry.model_path or self._args.hf_checkpoint
        return ModelPlan(entry.name, path, updates_weights, tuple(servers), None)

    def _size(self, entry: ModelEntry, group: ServerGroup) -> tuple[int, str]:
        """Return the GPUs per engine of a group, and the setting that decides it. Raises ConfigError."""
        if group.worker_type == "placeholder":
            return group.num_gpus, group.where
        size = group.num_gpus_per_engine or entry.num_gpus_per_engine or self._args.rollout_num_gpus_per_engine
        named = f"num_gpus_per_engine {size}"
        if not group.num_gpus_per_engine:
            given = f"{named} ({entry.where})"
            named = given if entry.num_gpus_per_engine else self._cite("rollout_num_gpus_per_engine")
        if group.num_gpus % size:
            hint = near_multiples(group.num_gpus, size)
            raise ConfigError(f"{group.where}: num_gpus {group.num_gpus} is no multiple of {named}; {hint}.")
        return size, named

    def _server(
        self,
        entry: ModelEntry,
        group: ServerGroup,
        kind: WorkerType,
        size: int,
        parts: list[Reservation],
        node: int,
        *,
        updates_weights: bool,
    ) -> ServerPlan:
        room, part = self._room, parts[node]
        encoded = any(other.worker_type == "encoder" for other in entry.server_groups)
        told = encoded and kind in ("regular", "prefill")
        forced = lora_fields(self._args) if updates_weights else {}
        if room.device == "cuda":
            forced |= {"base_gpu_id": part.gpus[0]}
            if self._args.offload_rollout and not room.is_shared(self._start, size):
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
        arguments = server_arguments(
            self._args, device=room.device, gpus=size, rank=self._rank,
            model_path=entry.model_path or self._args.hf_checkpoint, overrides=group.overrides,
            origin=f"{group.where}: model {entry.name!r}, {kind} group" if group.overrides else "", forced=forced,
        )  # fmt: skip
        return ServerPlan(
            name=f"{part.name}@{node}" if node else part.name,
            worker_type=kind,
            arguments=arguments,
            gpus=part.gpus,
            environment=server_environment(room.device, arguments, self._python),
            node=part.node,
            node_rank=node,
            num_nodes=len(parts),
            needs_encoder_urls=told,
        )
