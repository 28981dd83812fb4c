"""Settings -> `LaunchPlan`, or a one-line error that explains why no plan exists. Starts nothing and reads no model.

    rules between flags -> models (flags, or the file) -> GPUs (placement) -> servers (server_groups) -> routers

`SglangEngine` calls `check` before a run and `make_plan` when it starts; `slime engines plan` prints `plan_of`. The
plan is for the described cluster, so a laptop can plan 16 GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from slime_engine_http.placement import (
    Cited,
    Device,
    Room,
    cluster_gpus,
    find_device,
    find_room,
    is_planned_later,
    near_multiples,
)
from slime_engine_http.plan import LaunchPlan, ModelPlan, WorkerType

from slime_core.config.settings import Origin, Settings
from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_engine_sglang.arguments import router_arguments
from slime_engine_sglang.models_yaml import ModelEntry, ServerGroup, read_models
from slime_engine_sglang.server_groups import Filler

USES = frozenset(
    {
        "actor_num_nodes",
        "actor_num_gpus_per_node",
        "colocate",
        "engine_router",
        "num_gpus_per_node",
        "prefill_num_servers",
        "rollout_num_gpus",
        "rollout_num_gpus_per_engine",
        "sglang_config",
        "sglang_router_request_timeout_secs",
    }
)
"""Settings that determine the plan; an engine started from a plan has them in its `uses`."""
DEFAULT_MODEL = "default"
"""Name of the only model of a run without `--sglang-config`, as in THUDM/slime."""


def make_plan(
    args: Args, *, device: Device, num_gpus_visible: int = 0, origins: Mapping[str, Origin] | None = None
) -> LaunchPlan:
    """Return the plan of servers and routers to start.

    Args:
        args: The run's settings.
        device: Device that servers run on.
        num_gpus_visible: Number of GPUs over all nodes; ignored on CPU.
        origins: Sources of the settings, for messages.

    Raises:
        ConfigError: The settings cannot work.
    """
    cite = Cited(args, origins)
    _check_exclusions(args, cite)
    if args.rollout_external_engine_addrs:
        return _plan_of_running(args, device, cite)
    entries = _from_file(args, cite) if args.sglang_config else None
    listed = sum(g.num_gpus for e in entries for g in e.server_groups) if entries is not None else None
    room, warnings = find_room(args, device, num_gpus_visible, listed, cite)
    if entries is None:
        entries = [_from_flags(args, room, cite)]
    receiver = _receiver(args, entries, warnings)
    filler = Filler(args, room, cite)
    filled = [(entry, filler.fill(entry, updates_weights=entry is receiver)) for entry in entries]
    models = [model for entry, model in filled if entry.serves or not entry.server_groups]
    return LaunchPlan(tuple(_with_routers(args, models, cite)), device, tuple(filler.reserved), tuple(warnings))


def plan_of(settings: Settings, *, num_gpus: int | None = None) -> LaunchPlan:
    """Return the plan of these settings, for this machine or for an assumed number of GPUs.

    Args:
        settings: Settings of the run.
        num_gpus: Assumed number of GPUs (0: none); by default the GPUs that are visible on this machine.

    Raises:
        ConfigError: The settings cannot work.
    """
    args = settings.args
    if not (args.hf_checkpoint or args.sglang_config):
        raise ConfigError("--hf-checkpoint is required: a directory in Hugging Face layout.")
    device, visible = find_device(args.device, num_gpus)
    return make_plan(args, device=device, num_gpus_visible=visible, origins=settings.origins)


def check(settings: Settings) -> list[str]:
    """Return the warnings of the plan for a run on this machine. Raises ConfigError if the plan cannot work.

    With several nodes the cluster's GPUs count. They are in `CLUSTER_GPUS` once the launcher knows the cluster; before
    that, the launcher itself requests the plan.
    """
    if is_planned_later(settings):
        return []
    cluster = cluster_gpus()
    trains = settings.command == "train" and not settings.args.debug_rollout_only
    plan = plan_of(settings, num_gpus=cluster)
    if trains and not any(model.updates_weights for model in plan.models):
        names = ", ".join(model.name for model in plan.models)
        raise ConfigError(
            f"{settings.cite('sglang_config')}: none of its models ({names}) receives the trainer's weights; set"
            " update_weights: true for the one that is trained."
        )
    if settings.args.use_sampling_mask and plan.main.is_disaggregated:
        raise ConfigError(
            f"{settings.cite('use_sampling_mask')}: the router in front of prefill and decode servers does not ask for"
            " it; use regular servers."
        )
    if plan.num_nodes > 1 if cluster is None else len({server.node for server in plan.servers}) > 1:
        raise ConfigError(
            f"the servers would lie on {plan.num_nodes} nodes of {settings.cite('num_gpus_per_node')}, and this run"
            " starts them on this machine only; set --num-gpus-per-node to its number of GPUs, or start the others"
            " yourself and name them with --rollout-external-engine-addrs."
        )
    warnings = list(plan.warnings)
    if plan.device == "cpu" and any(model.is_disaggregated for model in plan.models):
        warnings.append("SGLang's transfer from prefill to decode servers is made for GPUs; on CPU it may not start")
    return warnings


# -- rules between flags -----------------------------------------------------------------------------------


def _check_exclusions(args: Args, cite: Cited) -> None:
    ways = ("rollout_external_engine_addrs", "sglang_config", "prefill_num_servers")
    given = [name for name in ways if getattr(args, name)]
    if len(given) > 1:
        raise ConfigError(f"{cite(given[0])} and {cite(given[1])} exclude each other; use one.")
    if args.sglang_router_ip and not args.sglang_router_port:
        raise ConfigError(f"{cite('sglang_router_ip')} needs --sglang-router-port N.")
    if not args.engine_router and args.sglang_router_port:
        raise ConfigError(f"{cite('engine_router')} contradicts {cite('sglang_router_port')}; remove one.")
    if args.rollout_num_gpus == 0 and not (args.engine_router or args.rollout_external_engine_addrs):
        raise ConfigError(f"{cite('rollout_num_gpus')} with {cite('engine_router')} starts nothing; remove one.")
    if args.rollout_num_gpus == 0 and args.prefill_num_servers:
        raise ConfigError(f"{cite('rollout_num_gpus')} leaves nothing for {cite('prefill_num_servers')}; remove one.")


# -- models ------------------------------------------------------------------------------------------------


def _from_file(args: Args, cite: Cited) -> list[ModelEntry]:
    assert args.sglang_config is not None, "who calls this has looked"
    entries = read_models(args.sglang_config, cite("sglang_config"))
    for entry in entries:
        if entry.model_path is None and not args.hf_checkpoint:
            raise ConfigError(f"{entry.where}: model {entry.name!r} needs 'model_path', or --hf-checkpoint DIR.")
    return entries


def _from_flags(args: Args, room: Room, cite: Cited) -> ModelEntry:
    """Return one model on all GPUs; `--prefill-num-servers` of its engines only prefill, the others only decode."""
    size, total = args.rollout_num_gpus_per_engine, room.total
    entry = ModelEntry(name=DEFAULT_MODEL).at(cite("rollout_num_gpus_per_engine"))
    if total % size:
        asked = cite("rollout_num_gpus") if args.rollout_num_gpus is not None else f"{total} GPUs for inference"
        raise ConfigError(
            f"{asked} is no multiple of {cite('rollout_num_gpus_per_engine')}; {near_multiples(total, size)}."
        )
    prefill = (args.prefill_num_servers or 0) * size
    if prefill and prefill >= total:
        engines = total // size
        fits = f"at most {engines - 1} fit, or" if engines > 1 else "it needs two, so"
        raise ConfigError(
            f"{cite('prefill_num_servers')}: there are {total} GPUs for engines of"
            f" {cite('rollout_num_gpus_per_engine')}, and some must decode; {fits} give --rollout-num-gpus N more."
        )
    sizes: list[tuple[WorkerType, int]] = [("regular", total)]
    if prefill:
        sizes = [("prefill", prefill), ("decode", total - prefill)]
    entry.server_groups = [
        ServerGroup(worker_type=kind, num_gpus=gpus).at(cite("prefill_num_servers")) for kind, gpus in sizes if gpus
    ]
    return entry


def _receiver(args: Args, entries: list[ModelEntry], warnings: list[str]) -> ModelEntry | None:
    """Return the model that gets the trainer's weights: the first that may receive them."""
    may = [e for e in entries if _may_update(args, e)]
    for entry in may[1:]:
        warnings.append(
            f"{entry.where}: model {entry.name!r} keeps its first weights: only {may[0].name!r}, the first model with"
            " update_weights, receives the trainer's; update_weights: false says so."
        )
    return may[0] if may else None


def _may_update(args: Args, entry: ModelEntry) -> bool:
    if entry.server_groups and not entry.serves:
        return False
    if entry.update_weights is not None:
        return entry.update_weights
    return entry.model_path is None or os.path.normpath(entry.model_path) == os.path.normpath(args.hf_checkpoint or "")


# -- routers -----------------------------------------------------------------------------------------------


def _plan_of_running(args: Args, device: Device, cite: Cited) -> LaunchPlan:
    """Return a plan of servers that are already running, behind a router."""
    warnings = []
    if args.rollout_num_gpus:
        warnings.append(f"{cite('rollout_num_gpus')} has no effect with {cite('rollout_external_engine_addrs')}")
    addresses = tuple(args.rollout_external_engine_addrs or ())
    model = ModelPlan(DEFAULT_MODEL, args.hf_checkpoint, True, (), None, external=addresses)
    return LaunchPlan(tuple(_with_routers(args, [model], cite)), device, warnings=tuple(warnings))


def _with_routers(args: Args, models: list[ModelPlan], cite: Cited) -> list[ModelPlan]:
    """Return the plan with a router for each model with servers; a running router serves the main model."""
    main = next((model for model in models if model.updates_weights), models[0])
    routed = []
    for model in models:
        if model is main and args.sglang_router_ip:
            assert args.sglang_router_port is not None, "checked by `_check_exclusions`"
            model = replace(model, router_address=(args.sglang_router_ip, args.sglang_router_port))
        elif args.engine_router:
            fields = dict(router_arguments(args))
            if model.is_disaggregated:
                fields["pd_disaggregation"] = True
            if model is main and args.sglang_router_port:
                fields["port"] = args.sglang_router_port
            model = replace(model, router=fields)
        elif model.is_disaggregated:
            raise ConfigError(
                f"{cite('engine_router')}: only a router brings prefill and decode servers of model {model.name!r}"
                " together; remove the flag."
            )
        routed.append(model)
    return routed
