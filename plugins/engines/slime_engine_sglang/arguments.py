"""--sglang-*, --router-* and YAML overrides -> the fields of `ServerArgs` and `RouterArgs`, and their command lines.

The installed version's own parser defines the valid fields (`flag_list`). The code that starts a server adds host and
ports, which are not known earlier.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from slime_core.config.flag_parser import FlagParser, words
from slime_core.config.spec import flag_specs
from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_engine_sglang.flag_list import ROUTER, SERVER, EngineFlags, flags_for
from slime_engine_sglang.owned import ROUTER_OWNED, SERVER_OWNED, refuse_owned

logger = logging.getLogger(__name__)

ON_CPU: Mapping[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_total_tokens": 32768,
    "mem_fraction_static": 0.3,
    "sleep_on_idle": True,
    "image_processor_backend": "pil",
    "lora_backend": "torch_native",
}
"""Defaults without CUDA. Without a limit the key-value cache takes most of the machine's memory; without sleep an idle
scheduler keeps a core busy that the trainer needs."""

ROUTER_DEFAULTS: Mapping[str, Any] = {"log_level": "warn", "balance_abs_threshold": 10, "balance_rel_threshold": 1.2}
"""Router defaults from THUDM/slime; the router's own defaults let one worker run far ahead of the others."""


def server_arguments(
    args: Args,
    *,
    device: Literal["cpu", "cuda"],
    gpus: int,
    rank: int = 0,
    model_path: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    origin: str = "",
    forced: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return `ServerArgs` field -> value for one server, except host, ports and fields that depend on the node.

    Precedence, lowest first: slime's defaults, --sglang-* settings, `overrides`, fields forced by slime, `forced`.

    Args:
        args: The run's settings.
        device: Device of the server; "cpu" adds the defaults for CPU servers.
        gpus: GPUs (on CPU: processes) of the engine, over all its nodes = tp_size * pp_size.
        rank: Number of the engine within the run, from 0; decides its seed (args.seed + rank * gpus).
        model_path: Directory of the model; args.hf_checkpoint by default.
        overrides: `overrides:` of a group in the --sglang-config file: ServerArgs fields, long or short names, dashes
            or underscores.
        origin: Origin of the overrides, for messages, such as "models.yaml: model 'actor', server group 0".
        forced: Fields set by the caller (disaggregation_mode, nnodes, node_rank, base_gpu_id, ...); slime's own names
            are allowed. A field that the installed version does not know is dropped with one log line.

    Raises:
        ConfigError: A field is unknown (with a suggestion), has a value of the wrong type, belongs to slime, or
            contradicts another. The message begins with the flag or the origin.
    """
    flags = flags_for(args)
    given = _settings(args, SERVER, flags.server, SERVER_OWNED)
    ours = _typed_overrides(overrides or {}, flags.server, origin)
    refuse_owned(ours, origin)
    _argv(SERVER, given, flags, "--sglang-")
    given |= {name: value for name, value in ours.items() if value is not None and name not in SERVER_OWNED}
    _argv(SERVER, {name: given[name] for name in ours if name in given}, flags, f"{origin}: ")
    where = f" ({origin})" if origin else ""
    forced = _forced(args, device, gpus, rank, given, where) | dict(forced or {})
    defaults: dict[str, Any] = {"enable_metrics": True, **(ON_CPU if device == "cpu" else {})}
    if forced.get("enable_memory_saver") and "cuda_graph_config" not in given:
        # A captured prefill graph becomes invalid when memory pages are released and mapped again.
        defaults["cuda_graph_backend_prefill"] = "disabled"
    fields = {"model_path": model_path or args.hf_checkpoint, **_known(defaults, flags, SERVER), **given}
    return fields | _known(forced, flags, SERVER)


def _forced(args: Args, device: str, gpus: int, rank: int, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields that slime sets for every server. Raises ConfigError if the user's sizes do not fit."""
    pipeline, data = given.get("pp_size") or 1, given.get("dp_size") or 1
    if gpus % pipeline:
        raise ConfigError(
            f"--sglang-pp-size {pipeline}{where} does not divide the engine's {gpus} GPUs"
            " (--rollout-num-gpus-per-engine, which is tp_size * pp_size)."
        )
    tensor = gpus // pipeline
    if data > 1 and not given.get("enable_dp_attention"):
        raise ConfigError(
            f"--sglang-dp-size {data}{where} needs --sglang-enable-dp-attention; for more engines of one copy each set"
            " --rollout-num-gpus."
        )
    if tensor % (ranks := attention_ranks(given)):
        flag = "--sglang-dp-size" if ranks == data else "--sglang-attn-dp-size"
        raise ConfigError(f"{flag} {ranks}{where} does not divide the engine's tp_size {tensor}.")
    fields: dict[str, Any] = {
        "skip_server_warmup": True,
        "random_seed": args.seed + rank * gpus,
        "tp_size": tensor,
    }
    if device == "cuda" and args.offload_rollout:
        fields |= {"enable_memory_saver": True, "enable_draft_weights_cpu_backup": True}
    if args.use_rollout_routing_replay:
        fields["enable_return_routed_experts"] = True
    return fields


def attention_ranks(fields: Mapping[str, Any]) -> int:
    """Return the data-parallel ranks inside one engine.

    The field is `attn_dp_size` since SGLang 0.5.23, or `dp_size` with `enable_dp_attention`, which still works there.
    """
    older = fields.get("dp_size") if fields.get("enable_dp_attention") else None
    return int(fields.get("attn_dp_size") or older or 1)


def _settings(args: Args, owner: str, flags: FlagParser, owned: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields set by --sglang-* or --router-* settings: attributes of `args` with that prefix.

    User code may have set some of them, so their types are checked again.
    """
    # slime's own settings may have the prefix too; owned fields are in `args` only if they repeat slime's value.
    names = [
        name for name in vars(args) | (args.model_extra or {}) if name.startswith(owner) and name not in flag_specs()
    ]
    names = [name for name in names if name.removeprefix(owner) not in owned and getattr(args, name) is not None]
    typed = (flags.read(name, getattr(args, name), f"args.{name}") for name in names)
    return {attribute.removeprefix(owner): value for attribute, value in typed}


def _typed_overrides(overrides: Mapping[str, Any], flags: FlagParser, origin: str) -> dict[str, Any]:
    """Return the overrides, typed, under their field names. Raises ConfigError."""
    known = [name.removeprefix(SERVER) for name in flags.by_name]
    typed: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in overrides.items():
        name = str(key).replace("-", "_").removeprefix(SERVER)
        where = f"{origin}: {name}"
        if name not in known:
            raise ConfigError(flags.unknown(where, name, known))
        attribute, entry = flags.read(SERVER + name, value, where)
        field = attribute.removeprefix(SERVER)
        if field in typed:
            raise ConfigError(f"{origin}: {name!r} is already set as {spelled[field]!r}; remove one.")
        typed[field], spelled[field] = entry, name
    return typed


def _known(fields: Mapping[str, Any], flags: EngineFlags, owner: str) -> dict[str, Any]:
    """Drop the fields that this version does not have; log them once."""
    unknown = tuple(sorted(name for name in fields if flags.field(owner, name) is None))
    if unknown:
        _say_left_out((flags.server if owner == SERVER else flags.router).prog, unknown)
    return {name: value for name, value in fields.items() if name not in unknown}


@cache
def _say_left_out(version: str, names: tuple[str, ...]) -> None:
    logger.info("left out, as %s does not have it: %s", version, ", ".join(names))


def to_argv(fields: Mapping[str, Any], python: Path | None = None, owner: str = SERVER) -> list[str]:
    """Return the command-line arguments for `ServerArgs` or `RouterArgs` fields.

    They are for `python -m sglang.launch_server`, or with `ROUTER` for `python -m sglang_router.launch_router`, whose
    selectors are KEY=VALUE lists.

    Args:
        fields: Output of `server_arguments` or `router_arguments`, and host, port and so on. None: not given. A field
            that the version does not have is left out with one log line.
        python: Interpreter of SGLang's environment; its version decides the spelling.
        owner: `SERVER` or `ROUTER`.

    Raises:
        ConfigError: A value cannot be written on that version's command line.
    """
    return _argv(owner, fields, flags_for({"engine_python": python}))


def router_arguments(args: Args) -> dict[str, Any]:
    """Return `RouterArgs` field -> value (names without `router_`), except host, ports and workers.

    Raises:
        ConfigError: A --router-* flag is unknown, malformed or belongs to slime.
    """
    flags = flags_for(args)
    forced = {"request_timeout_secs": args.sglang_router_request_timeout_secs}
    given = _settings(args, ROUTER, flags.router, ROUTER_OWNED)
    return _known(ROUTER_DEFAULTS, flags, ROUTER) | given | _known(forced, flags, ROUTER)


def _argv(owner: str, fields: Mapping[str, Any], flags: EngineFlags, where: str = "--") -> list[str]:
    """Return the words of every field that is not None; `where` begins the message about an invalid value."""
    argv: list[str] = []
    for name, value in _known({n: v for n, v in fields.items() if v is not None}, flags, owner).items():
        flag = flags.field(owner, name)
        assert flag is not None
        # A switch that is off and an empty list equal the default, and have no words.
        if flag.default in (False, None, []) and (value is flag.default or (flag.nargs == "+" and not value)):
            continue
        try:
            first, *rest = words(flag, value)
        except ValueError as error:
            raise ConfigError(f"{where}{name if where.endswith(' ') else name.replace('_', '-')}: {error}") from None
        argv += [first.replace(owner.replace("_", "-"), "", 1), *rest]
    return argv
