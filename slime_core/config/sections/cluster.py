"""Settings of placement: nodes, GPUs, offloading, process groups, fault tolerance."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slime_core.config.sections.base import Section


class ClusterArgs(Section):
    """Cluster."""

    actor_num_nodes: Annotated[int, Field(gt=0)] = 1
    """Nodes for training."""
    actor_num_gpus_per_node: Annotated[int, Field(gt=0)] = 8
    """GPUs for training per node."""
    rollout_num_gpus: Annotated[int | None, Field(ge=0)] = None
    """GPUs for inference, after those for training; 0 launches no engine. By default those that training leaves, with
    --colocate its own, and on CPU one engine."""
    rollout_num_gpus_per_engine: Annotated[int, Field(gt=0)] = 1
    """GPUs per rollout engine, over all its nodes; on CPU its processes."""
    num_gpus_per_node: Annotated[int, Field(gt=0)] = 8
    """GPUs per node for rollout placement."""
    colocate: bool = False
    """Training and inference share the GPUs."""
    offload: bool = False
    """Same as --offload-train --offload-rollout."""
    offload_train: bool | None = None
    """Release the trainer's GPU memory while generating."""
    offload_rollout: bool | None = None
    """Release the engines' GPU memory while training."""
    release_train: bool = False
    """End the trainer's processes while generating."""
    train_env_vars: dict[str, Any] = Field(default_factory=dict)
    """Environment variables of the trainer's processes, as JSON."""
    distributed_backend: Literal["nccl", "gloo", "auto"] = "auto"
    """Process group backend; auto takes nccl on CUDA and gloo on CPU."""
    distributed_timeout_minutes: Annotated[int, Field(gt=0)] = 10
    """Longest wait for another process of the group."""
    use_distributed_post: bool = False
    """Send requests to engines from one process per node."""
    http_proxy: str | None = None
    """Proxy for requests to rollout servers; without it none is used, whatever HTTP_PROXY says."""
    rollout_data_transport: Literal["object-store", "nixl"] = "object-store"
    """How rollout data reaches trainers in other processes."""
    use_fault_tolerance: bool = False
    """Watch the rollout engines and restart the ones that die."""
    rollout_health_check_interval: Annotated[float, Field(gt=0)] = 30.0
    """Seconds between health checks of an engine."""
    rollout_health_check_timeout: Annotated[float, Field(gt=0)] = 30.0
    """Seconds an engine has to answer a health check."""
    rollout_health_check_first_wait: Annotated[float, Field(ge=0)] = 0.0
    """Seconds before the first health check, after every start of an engine."""
    rollout_max_engine_restarts: Annotated[int, Field(ge=0)] = 10
    """Restarts of one engine, or router, in a run; after that it stays out."""
