"""The flags of SGLang and its router whose values are slime's to say, and what to set instead.

A user's value for one is refused, unless it is what slime sets anyway: scripts written for SGLang itself repeat such
things, and then it ends in a warning. dp_size, pp_size, ep_size and dtype are the user's; so is tp_size, but with
--rollout-num-gpus-per-engine it can only say the same again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_core.config.settings import Entry
from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_engine_sglang.flag_list import ROUTER, SERVER
from slime_engine_sglang.foreign import USED_BY

_NODES = "slime places engines on nodes; set --rollout-num-gpus, --rollout-num-gpus-per-engine and --num-gpus-per-node"
_DISAGGREGATION = "set --prefill-num-servers, or worker_type in a --sglang-config file"
_PLAIN_HTTP = "slime talks to its servers over plain HTTP on a private network; remove it"
_NO_KEY = "slime's requests carry no key; keep the servers on a private network and remove it"

SERVER_OWNED: Mapping[str, str] = {
    "model_path": "set --hf-checkpoint, or model_path of a model in a --sglang-config file",
    "config": "put the settings into slime's own --config file, as sglang_NAME: VALUE",
    "random_seed": "set --seed, from which each engine's seed follows",
    "enable_memory_saver": "set --offload-rollout",
    "enable_draft_weights_cpu_backup": "it follows from --offload-rollout; remove it",
    "tp_size": "--rollout-num-gpus-per-engine is tp_size * pp_size; set one of them",
    "host": "slime chooses addresses; for servers of your own set --rollout-external-engine-addrs",
    "port": "slime takes free ports; for servers of your own set --rollout-external-engine-addrs",
    "nnodes": _NODES,
    "node_rank": _NODES,
    "dist_init_addr": _NODES,
    "gpu_id_step": _NODES,
    "base_gpu_id": _NODES,
    "nccl_port": "slime takes free ports; remove it",
    "skip_server_warmup": "slime always sets it, as its own readiness check generates; remove it",
    "enable_return_routed_experts": "set --use-rollout-routing-replay",
    "weight_version": "slime counts weight versions; remove it",
    "disaggregation_mode": _DISAGGREGATION,
    "disaggregation_bootstrap_port": "slime takes free ports; remove it",
    "prefill_round_robin_balance": _DISAGGREGATION,
    "encoder_only": "set worker_type: encoder in a --sglang-config file",
    "language_only": "it follows from worker_type: encoder in a --sglang-config file; remove it",
    "encoder_urls": "they follow from worker_type: encoder in a --sglang-config file; remove it",
    "encoder_bootstrap_port": "slime takes free ports; remove it",
    "use_ray": "slime starts the servers itself; remove it",
    "grpc_mode": "slime talks to its servers over HTTP; remove it",
    "smg_grpc_mode": "slime talks to its servers over HTTP; remove it",
    "ssl_keyfile": _PLAIN_HTTP,
    "ssl_certfile": _PLAIN_HTTP,
    "ssl_ca_certs": _PLAIN_HTTP,
    "ssl_keyfile_password": _PLAIN_HTTP,
    "enable_ssl_refresh": _PLAIN_HTTP,
    "api_key": _NO_KEY,
    "admin_api_key": _NO_KEY,
    "fastapi_root_path": "slime asks the servers at the root path; remove it",
}
"""`ServerArgs` field -> what to do instead."""

ROUTER_OWNED: Mapping[str, str] = {
    "host": "for a router of your own set --sglang-router-ip and --sglang-router-port",
    "port": "set --sglang-router-port, or nothing: slime takes a free port",
    "worker_urls": "slime registers its servers; for servers of your own set --rollout-external-engine-addrs",
    "prometheus_host": "slime listens on the router's own address; remove it",
    "prometheus_port": "slime takes a free port, as each model has a router of its own; remove it",
    "request_timeout_secs": "set --sglang-router-request-timeout-secs",
    "pd_disaggregation": _DISAGGREGATION,
    "prefill": _DISAGGREGATION,
    "decode": _DISAGGREGATION,
    "mini_lb": "slime registers servers over the router's own API, which it lacks; remove it",
    "service_discovery": "slime registers its servers; remove it",
    "tls_cert_path": _PLAIN_HTTP,
    "tls_key_path": _PLAIN_HTTP,
    "api_key": _NO_KEY,
    "control_plane_api_keys": _NO_KEY,
    "jwt_issuer": _NO_KEY,
    "jwt_audience": _NO_KEY,
    "jwt_jwks_uri": _NO_KEY,
}
"""Field of the router's parser -> what to do instead."""


def check_server_flags(args: Args, given: Mapping[str, Entry]) -> list[str]:
    """Warnings for owned --sglang-* flags that repeat slime's value. Raises ConfigError for the others.

    With another engine none of them has an effect, which a warning says elsewhere.
    """
    if args.rollout_engine not in USED_BY:
        return []
    return _check(SERVER, SERVER_OWNED, _server_values(args), given)


def check_router_flags(args: Args, given: Mapping[str, Entry]) -> list[str]:
    """Warnings for owned --router-* flags that repeat slime's value. Raises ConfigError for the others."""
    if args.rollout_engine not in USED_BY:
        return []
    known = {"request_timeout_secs": args.sglang_router_request_timeout_secs}
    return _check(ROUTER, ROUTER_OWNED, known, given)


def _server_values(args: Args) -> dict[str, Any]:
    """Field -> what slime is going to set, where that is known from the settings alone."""
    known = {
        "model_path": args.hf_checkpoint,
        "skip_server_warmup": True,
        "enable_memory_saver": bool(args.offload_rollout),
        "enable_return_routed_experts": bool(args.use_rollout_routing_replay),
    }
    pipeline = getattr(args, SERVER + "pp_size", None) or 1
    gpus = args.rollout_num_gpus_per_engine
    if gpus % pipeline == 0:
        known["tp_size"] = gpus // pipeline
    return known


def _check(owner: str, owned: Mapping[str, str], known: Mapping[str, Any], given: Mapping[str, Entry]) -> list[str]:
    refused, repeated = [], []
    for attribute, entry in given.items():
        field = attribute.removeprefix(owner)
        if field not in owned or entry.value is None:
            continue
        value = "" if entry.value is True else f" {entry.value}"
        cited = f"--{attribute.replace('_', '-')}{value} ({entry.origin})"
        if field in known and known[field] == entry.value:
            if field != "tp_size":  # whose value slime's own may come from
                repeated.append(cited)
        else:
            refused.append(f"{cited} is slime's to set: {owned[field]}.")
    if refused:
        raise ConfigError("\n".join(refused))
    if not repeated:
        return []
    return [f"without need, as slime sets the same by itself: {', '.join(repeated)}"]


def refuse_owned(fields: Mapping[str, Any], origin: str) -> None:
    """Raise ConfigError when overrides of a --sglang-config file hold a field that is slime's.

    `skip_server_warmup` with slime's own value is let through, as on the command line.
    """
    always = {"skip_server_warmup": True}
    refused = [
        f"{origin}: {name} {fields[name]!r} is slime's to set: {text}."
        for name, text in SERVER_OWNED.items()
        if name in fields and fields[name] is not None and not (name in always and fields[name] == always[name])
    ]
    if refused:
        raise ConfigError("\n".join(refused))
