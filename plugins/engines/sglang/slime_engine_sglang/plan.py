"""Settings -> which servers and routers are started, with which arguments; nothing is started here.

`SglangEngine` asks for the plan before anything runs, so that whatever cannot work is refused in one line. Made by
`planner.make_plan`. Ports and addresses are not in it; they are taken on the machine at the moment a process starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from slime_core.text import table

WorkerType = Literal["regular", "prefill", "decode", "encoder"]


@dataclass(frozen=True)
class ServerPlan:
    """One SGLang server: one process group, `gpus` of it on this node."""

    name: str
    """For logs and events, such as "default/0"; of an engine over several nodes "default/0@1" is node rank 1."""
    worker_type: WorkerType
    arguments: Mapping[str, Any]
    """`ServerArgs` field -> value, complete but for host, ports, `dist_init_addr` and `encoder_urls`."""
    gpus: tuple[int, ...] = ()
    """Device ordinals on its node; empty on CPU."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the process's environment."""
    node: int = 0
    """Which node of the cluster it runs on."""
    node_rank: int = 0
    num_nodes: int = 1
    """An engine with more GPUs than a node has is one server per node; rank 0 answers HTTP."""
    needs_encoder_urls: bool = False
    """It is started after the model's encoders, with their URLs as `encoder_urls`."""

    @property
    def engine(self) -> str:
        """Name of the engine, the same for its servers on all nodes."""
        return self.name.partition("@")[0]


@dataclass(frozen=True)
class Reservation:
    """GPUs of one node that an engine has, or that a placeholder keeps free."""

    name: str
    """Of the engine or placeholder."""
    node: int
    gpus: tuple[int, ...]
    """Ordinals on the node; empty on CPU."""


@dataclass(frozen=True)
class ModelPlan:
    """The servers of one model, in the order in which they start, and the router in front of them."""

    name: str
    model_path: str
    updates_weights: bool
    """Whether it receives the trainer's weights; one model of a plan at most."""
    servers: tuple[ServerPlan, ...]
    router: Mapping[str, Any] | None
    """`RouterArgs` field -> value, complete but for host and ports (`port` is there when the user chose it); None: no
    router is started for it."""
    router_address: tuple[str, int] | None = None
    """Router that is already running."""
    external: tuple[str, ...] = ()
    """Addresses of servers that are already running."""

    @property
    def is_disaggregated(self) -> bool:
        """Prefill and decode run on different servers."""
        return any(server.worker_type in ("prefill", "decode") for server in self.servers)


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that one run starts."""

    models: tuple[ModelPlan, ...]
    device: Literal["cpu", "cuda"]
    reserved: tuple[Reservation, ...] = ()
    """Of all models, those included that have nothing else and so are not in `models`."""
    warnings: tuple[str, ...] = ()
    """What the settings ask for and do not get."""

    @property
    def main(self) -> ModelPlan:
        """The model that the run generates with: the one that receives weights, else the first."""
        return next((model for model in self.models if model.updates_weights), self.models[0])

    @property
    def servers(self) -> tuple[ServerPlan, ...]:
        """Of all models."""
        return tuple(server for model in self.models for server in model.servers)

    @property
    def num_nodes(self) -> int:
        """Nodes up to the last one with a server or a reservation."""
        return max([*(s.node for s in self.servers), *(held.node for held in self.reserved)], default=0) + 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def describe(self) -> str:
        """A table of servers, GPUs, arguments and routers, for people."""
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
