"""Settings -> the plan of vLLM's servers, their commands, and the processes that run them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from slime_engine_http.api.transport import MODEL_INFO, Http
from slime_engine_http.placement import Cited, cluster_gpus, find_device, find_room, near_multiples
from slime_engine_http.plan import LaunchPlan, ModelPlan, ServerPlan
from slime_engine_http.ports import PortBlock
from slime_engine_http.service import Place, Service, StrangerError

from slime_core.config.settings import Origin, Settings
from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_engine_vllm.calls import VllmHttp
from slime_engine_vllm.environment import SERVER_SIDE, server_environment
from slime_engine_vllm.flags import given_flags

_GRACE_S = 8.0
"""Seconds from TERM to KILL: vLLM takes 2 to 3 to end its processes and to free their shared memory."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_ON_CPU: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    # vLLM 0.32 ends when a prompt with a seed is split: it sets back the generator, which CPUs cannot.
    "enable_chunked_prefill": False,
}


def make_plan(args: Args, *, num_gpus: int | None = None, origins: Mapping[str, Origin] | None = None) -> LaunchPlan:
    """Return the servers to start on this machine.

    Args:
        args: The run's settings.
        num_gpus: Number of GPUs; by default those that are visible.
        origins: Sources of the settings, for messages.

    Raises:
        ConfigError: The settings cannot work.
    """
    device, visible = find_device(args.device, num_gpus)
    cite = Cited(args, origins)
    if args.rollout_external_engine_addrs:
        addresses = tuple(args.rollout_external_engine_addrs)
        return LaunchPlan((ModelPlan("default", args.hf_checkpoint, True, (), None, external=addresses),), device)
    room, warnings = find_room(args, device, visible, None, cite)
    size = args.rollout_num_gpus_per_engine
    if room.total % size or not room.total:
        raise ConfigError(
            f"{cite('rollout_num_gpus')} is no multiple of {cite('rollout_num_gpus_per_engine')}:"
            f" {near_multiples(room.total, size)}."
        )
    given = given_flags(args)
    servers = []
    for number in range(room.total // size):
        (part, *others) = room.parts(number * size, size, f"default/{number}", cite("rollout_num_gpus_per_engine"))
        if others or part.node:
            raise ConfigError(
                f"{cite('rollout_num_gpus')}: vLLM's servers are started on one machine of"
                f" {cite('num_gpus_per_node')}; start the others yourself and name them with"
                " --rollout-external-engine-addrs."
            )
        servers.append(
            ServerPlan(
                name=part.name,
                worker_type="regular",
                arguments=server_arguments(args, device, size, number, given),
                gpus=part.gpus,
                environment=server_environment(device, adapters=args.lora_unmerged),
            )
        )
    model = ModelPlan("default", args.hf_checkpoint, True, tuple(servers), None)
    return LaunchPlan((model,), device, warnings=tuple(warnings))


def check_plan(settings: Settings) -> LaunchPlan:
    """Return the plan for a run on this machine. Raises ConfigError."""
    return make_plan(settings.args, num_gpus=cluster_gpus(), origins=settings.origins)


def server_arguments(args: Args, device: str, gpus: int, number: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's flag -> value for a server, without its address. Raises ConfigError if the sizes do not fit."""
    pipeline = given.get("pipeline_parallel_size") or 1
    if gpus % pipeline:
        raise ConfigError(
            f"--vllm-pipeline-parallel-size {pipeline} does not divide the engine's {gpus} GPUs"
            " (--rollout-num-gpus-per-engine)."
        )
    ours = {
        "tensor_parallel_size": gpus // pipeline,
        "seed": args.seed + number * gpus,
        "enable_scale_out": True,  # the route of token ids
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": "slime"},
    }
    if args.lora_unmerged:
        ours |= {"enable_lora": True, "max_loras": 1 + len(args.lora_adapters), "max_lora_rank": _lora_rank(args)}
    return {**(_ON_CPU if device == "cpu" else {}), **given, **ours}


def _lora_rank(args: Args) -> int:
    """Return the smallest `--max-lora-rank` of vLLM that holds the run's. Raises ConfigError if none does."""
    rank = args.lora_rank or 1
    if rank > _LORA_RANKS[-1]:
        raise ConfigError(f"--lora-rank {rank}: vLLM adds adapters of rank {_LORA_RANKS[-1]} at most.")
    return next(most for most in _LORA_RANKS if most >= rank)


def to_argv(arguments: Mapping[str, Any]) -> list[str]:
    """Return the words of vLLM's command line."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


class VllmServer(Service):
    """A vLLM server on this machine."""

    http_class = VllmHttp

    def __init__(self, plan: ServerPlan, model_path: str, place: Place) -> None:
        """Reserve the port without starting the server. Raises EngineError."""
        self.plan, self._model_path = plan, model_path
        super().__init__(plan.name, f"vLLM server {plan.name}", place, ports=1, grace=_GRACE_S, shared="/dev/shm/psm_")

    def command(self, ports: PortBlock) -> list[str]:
        """Return the `vllm serve` command with all arguments."""
        where = ["--host", self.host, "--port", str(ports[0])]
        program = [str(self._place.python), str(SERVER_SIDE / "serve.py"), self._model_path]
        return [*program, *where, *to_argv(self.plan.arguments)]

    def environment(self) -> Mapping[str, str]:
        """Return the environment of the plan, and the server's GPUs."""
        if not self.plan.gpus:
            return self.plan.environment
        visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
        gpus = ",".join(visible[gpu] if visible else str(gpu) for gpu in self.plan.gpus)
        return {**self.plan.environment, "CUDA_VISIBLE_DEVICES": gpus}

    async def check(self, http: Http, left: float) -> None:
        """Check the server. Raises StrangerError if it serves another model."""
        await http.send("GET", self.url, "/health", timeout=left, attempts=1)
        told = (await http.send("GET", self.url, MODEL_INFO, timeout=left, attempts=1)).object()
        if (found := told.get("model_path")) != self._model_path:
            raise StrangerError(
                f"vLLM server {self.name}: what answers at {self.url} serves model {found!r}, not {self._model_path!r}"
            )
        await http.send("GET", self.url, "/health_generate", timeout=left, attempts=1)
