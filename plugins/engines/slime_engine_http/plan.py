"""The plan of a run's servers and routers, with their arguments; this module starts nothing.

`planner.make_plan` makes the plan from the settings. `SglangEngine` requests it before anything runs, so that
impossible settings are refused in one line. The plan has no ports and addresses: a process takes them when it starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from slime_core.text import table

WorkerType = Literal["regular", "prefill", "decode", "encoder"]


@dataclass(frozen=True)
class ServerPlan:
    """An SGLang server: a process group with `gpus` on this node."""

    name: str
    """Name for logs and events, such as "default/0"; "default/0@1" is node rank 1 of an engine over several nodes."""
    worker_type: WorkerType
    arguments: Mapping[str, Any]
    """`ServerArgs` field -> value, complete except for host, ports, `dist_init_addr` and `encoder_urls`."""
    gpus: tuple[int, ...] = ()
    """Device ordinals on its node; empty on CPU."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the process's environment."""
    node: int = 0
    """Index of the cluster node that the server runs on."""
    node_rank: int = 0
    num_nodes: int = 1
    """Number of nodes of the engine; an engine over several nodes has a server per node, and rank 0 serves HTTP."""
    needs_encoder_urls: bool = False
    """Whether the server starts after the model's encoders, with their URLs as `encoder_urls`."""

    @property
    def engine(self) -> str:
        """Name of the engine, the same for its servers on all nodes."""
        return self.name.partition("@")[0]


@dataclass(frozen=True)
class Reservation:
    """GPUs of one node that an engine has, or that a placeholder keeps free."""

    name: str
    """Name of the engine or placeholder."""
    node: int
    gpus: tuple[int, ...]
    """Ordinals on the node; empty on CPU."""


@dataclass(frozen=True)
class ModelPlan:
    """The servers of one model, in the order in which they start, and the router in front of them."""

    name: str
    model_path: str
    updates_weights: bool
    """Whether the model receives the trainer's weights; at most one model of a plan does."""
    servers: tuple[ServerPlan, ...]
    router: Mapping[str, Any] | None
    """`RouterArgs` field -> value, except host and ports (`port` is included if the user chose it); None to start no
    router for the model."""
    router_address: tuple[str, int] | None = None
    """Address of a router that is already running."""
    external: tuple[str, ...] = ()
    """Addresses of servers that are already running."""

    @property
    def is_disaggregated(self) -> bool:
        """Whether prefill and decode run on different servers."""
        return any(server.worker_type in ("prefill", "decode") for server in self.servers)


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that a run starts."""

    models: tuple[ModelPlan, ...]
    device: Literal["cpu", "cuda"]
    reserved: tuple[Reservation, ...] = ()
    """Reservations of all models, including models that have only reservations and so are not in `models`."""
    warnings: tuple[str, ...] = ()
    """Warnings about settings that the plan cannot follow."""

    @property
    def main(self) -> ModelPlan:
        """The model that the run generates with: the model that receives weights, otherwise the first."""
        return next((model for model in self.models if model.updates_weights), self.models[0])

    @property
    def servers(self) -> tuple[ServerPlan, ...]:
        """Servers of all models."""
        return tuple(server for model in self.models for server in model.servers)

    @property
    def num_nodes(self) -> int:
        """Number of nodes up to the last node with a server or a reservation."""
        return max([*(s.node for s in self.servers), *(held.node for held in self.reserved)], default=0) + 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    def describe(self) -> str:
        """Return a readable table of servers, GPUs, arguments and routers."""
        return "\n".join(_describe(self))


def _describe(plan: LaunchPlan) -> Iterator[str]:
    count = len(plan.servers)
    yield f"{count} server{'s' * (count != 1)} on {plan.device}" + (
        f", {plan.num_nodes} nodes" if plan.num_nodes > 1 else ""
    )
    for model in plan.models:
        what = "receives the trainer's weights" if model.updates_weights else "keeps its weights"
        yield from ("", f"model {model.name}: {model.model_path} ({what})", f"  router   {_router(model)}")
        if model.external:
            yield f"  running  {', '.join(model.external)}"
        arguments = [server.arguments for server in model.servers]
        shared = {k: v for k, v in (arguments[0] if arguments else {}).items() if all(_has(a, k, v) for a in arguments)}
        environment = {k: v for server in model.servers for k, v in server.environment.items() if k != "PYTHONPATH"}
        rows = [("server", "type", "node", "GPUs", "arguments of its own")] if model.servers else []
        for server in model.servers:
            own = {k: v for k, v in server.arguments.items() if k not in shared}
            if server.num_nodes > 1:
                own["dist_init_addr"] = "(at launch)"
            if server.needs_encoder_urls:
                own["encoder_urls"] = "(at launch)"
            rows.append((server.name, server.worker_type, str(server.node), _ordinals(server.gpus), _pairs(own)))
        yield from (f"  {line}" for line in table(rows))
        if shared:
            yield f"  {'all with' if len(model.servers) > 1 else 'with'}: {_pairs(shared)}"
        if environment:
            yield f"  environment: {_pairs(environment)}"
    if plan.reserved:
        yield from ("", "reserved")
        reserved = [(held.name, f"node {held.node}", f"GPUs {_ordinals(held.gpus)}") for held in plan.reserved]
        yield from (f"  {line}" for line in table(reserved))
    for warning in plan.warnings:
        yield from ("", f"warning: {warning}")


def _router(model: ModelPlan) -> str:
    if model.router_address is not None:
        return "{}:{}, already running".format(*model.router_address)
    if model.router is None:
        return "none" + (": requests go to the servers" if model.servers or model.external else "")
    return _pairs(model.router) or "SGLang's defaults"


def _has(arguments: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in arguments and bool(arguments[name] == value)


def _ordinals(gpus: Sequence[int]) -> str:
    if not gpus:
        return "-"
    return str(gpus[0]) if len(gpus) == 1 else f"{gpus[0]}-{gpus[-1]}"


def _pairs(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
