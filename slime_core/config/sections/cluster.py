"""Settings of placement: nodes, GPUs, offloading, process groups, fault tolerance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from slime_core.config.sections.base import Rule, Section

if TYPE_CHECKING:
    from slime_core.config.settings import Settings


class ClusterArgs(Section):
    """Cluster."""

    actor_num_nodes: PositiveInt = 1
    """Nodes for training; more than one are started by torchrun."""
    actor_num_gpus_per_node: PositiveInt = 8
    """GPUs for training per node, one process each. The embedded trainer starts several only where this is given."""
    rollout_num_gpus: NonNegativeInt | None = None
    """GPUs for inference, after those for training; 0 launches no engine. By default those that training leaves, with
    --colocate its own, and on CPU one engine."""
    rollout_num_gpus_per_engine: PositiveInt = 1
    """GPUs per rollout engine, over all its nodes; on CPU its processes."""
    num_gpus_per_node: PositiveInt = 8
    """GPUs per node for rollout placement."""
    colocate: bool = False
    """Training and inference share the GPUs; sets --offload-train and --offload-rollout."""
    offload: bool = False
    """Same as --offload-train --offload-rollout."""
    offload_train: bool | None = None
    """While generating, free gradients and move the optimizer's moments to host memory."""
    offload_rollout: bool | None = None
    """While training, free the engines' weights and KV cache."""
    release_train: bool = False
    """End the trainer's processes while generating."""
    ray_address: str | None = None
    """Ray cluster to run on: HOST:PORT, or auto for the one that this machine is part of. With --launcher ray and none
    given, a cluster of this machine is started for the run and stopped with it."""
    ray_placement_timeout: PositiveFloat = 300.0
    """Seconds to wait for other runs on the Ray cluster to make room."""
    train_env_vars: dict[str, Any] = {}
    """Environment variables of the trainer's processes, as JSON."""
    distributed_backend: Literal["nccl", "gloo", "auto"] = "auto"
    """Process group backend; auto takes nccl on CUDA and gloo on CPU."""
    distributed_timeout_minutes: PositiveInt = 10
    """Longest wait for a sign of life of another process of the group; a rollout may take longer."""
    use_distributed_post: bool = False
    """Send requests to engines from one process per node."""
    http_proxy: str | None = None
    """Proxy for requests to rollout servers; without it none is used, whatever HTTP_PROXY says."""
    rollout_data_transport: Literal["object-store", "nixl"] = "object-store"
    """How rollout data reaches trainers in other processes."""
    use_fault_tolerance: bool = False
    """Watch the rollout engines and restart the ones that die."""
    rollout_health_check_interval: PositiveFloat = 30.0
    """Seconds between health checks of an engine."""
    rollout_health_check_timeout: PositiveFloat = 30.0
    """Seconds an engine has to answer a health check."""
    rollout_health_check_first_wait: NonNegativeFloat = 0.0
    """Seconds before the first health check, after every start of an engine."""
    rollout_max_engine_restarts: NonNegativeInt = 10
    """Restarts of one engine, or router, in a run; after that it stays out."""


def _placement(s: Settings) -> None:
    """A command that trains nothing leaves every GPU to inference."""
    if s.command in ("eval", "rollout"):
        s.derive("actor_num_gpus_per_node", 0, f"slime {s.command}")


def _offloading(s: Settings) -> None:
    """Free each side's memory while the other works, for `--offload` and `--colocate`, unless a flag disables it."""
    a = s.args
    idle = None
    if s.command in ("eval", "rollout") or a.debug_rollout_only:
        idle = "nothing is trained"
    elif a.debug_train_only:
        idle = "nothing is generated"
    cause = "offload" if a.offload else "colocate" if a.colocate else None
    for name in ("offload", "offload_train", "offload_rollout"):
        if idle is not None and getattr(a, name) and (name != "offload" or s.is_given(name)):
            s.warnings.append(f"{s.cite(name)} has no effect: {idle}.")
        if name != "offload" and (idle is not None or not s.is_given(name)):
            s.derive(name, idle is None and cause is not None, cause or "colocate")


RULES: tuple[Rule, ...] = (_placement, _offloading)
