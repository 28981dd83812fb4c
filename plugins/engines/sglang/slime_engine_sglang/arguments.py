"""--sglang-*, --router-* and YAML overrides -> the fields of `ServerArgs` and `RouterArgs`, and their command lines.

What a field may be is what the installed version's own parser says (`flag_list`). Whoever starts a server adds host and
ports, which are not known before.
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
}
"""Defaults without CUDA; unbounded, the key-value cache takes most of the machine's memory, and without sleep a
scheduler that has nothing to do takes a core from the trainer."""

ROUTER_DEFAULTS: Mapping[str, Any] = {"log_level": "warn", "balance_abs_threshold": 10, "balance_rel_threshold": 1.2}
"""THUDM/slime's: the router's own let one worker run far ahead of the others."""


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
    """`ServerArgs` field -> value for one server; complete but for host, ports and what the node decides.

    Lowest first: slime's defaults, --sglang-* settings, `overrides`, what slime forces, `forced`.

    Args:
        args: The run's settings.
        device: What the server runs on; "cpu" adds the defaults that servers there need.
        gpus: GPUs (on CPU: processes) of the engine, over all its nodes = tp_size * pp_size.
        rank: Number of the engine within the run, from 0; decides its seed (args.seed + rank * gpus).
        model_path: Directory of the model; args.hf_checkpoint by default.
        overrides: `overrides:` of a group in the --sglang-config file: ServerArgs fields, long or short names, dashes
            or underscores.
        origin: Where the overrides come from, for messages, such as "models.yaml: model 'actor', server group 0".
        forced: Fields that the caller decides (disaggregation_mode, nnodes, node_rank, base_gpu_id, ...); slime's own
            names are allowed. A field that the installed version does not know is dropped with one log line.

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
        # Pages that are given back and mapped anew do not survive in a captured prefill graph.
        defaults["cuda_graph_backend_prefill"] = "disabled"
    fields = {"model_path": model_path or args.hf_checkpoint, **_known(defaults, flags, SERVER), **given}
    return fields | _known(forced, flags, SERVER)


def _forced(args: Args, device: str, gpus: int, rank: int, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What slime decides for every server. Raises ConfigError when the user's sizes do not fit."""
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
    """Data-parallel ranks inside one engine: `attn_dp_size`, which SGLang has from 0.5.23 on, or `dp_size` with
    `enable_dp_attention`, which still says the same there."""
    older = fields.get("dp_size") if fields.get("enable_dp_attention") else None
    return int(fields.get("attn_dp_size") or older or 1)


def _settings(args: Args, owner: str, flags: FlagParser, owned: Mapping[str, str]) -> dict[str, Any]:
    """Fields that --sglang-* or --router-* settings give: attributes of `args` with that prefix.

    Users' own code may have set some, so they are typed again.
    """
    # slime's own settings begin so too, and owned ones are here only when they repeat slime's value.
    names = [
        name for name in vars(args) | (args.model_extra or {}) if name.startswith(owner) and name not in flag_specs()
    ]
    names = [name for name in names if name.removeprefix(owner) not in owned and getattr(args, name) is not None]
    typed = (flags.read(name, getattr(args, name), f"args.{name}") for name in names)
    return {attribute.removeprefix(owner): value for attribute, value in typed}


def _typed_overrides(overrides: Mapping[str, Any], flags: FlagParser, origin: str) -> dict[str, Any]:
    """Overrides under their fields' names. Raises ConfigError."""
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
    """Without what this version does not have; said once in the log."""
    unknown = tuple(sorted(name for name in fields if flags.field(owner, name) is None))
    if unknown:
        _say_left_out((flags.server if owner == SERVER else flags.router).prog, unknown)
    return {name: value for name, value in fields.items() if name not in unknown}


@cache
def _say_left_out(version: str, names: tuple[str, ...]) -> None:
    logger.info("left out, as %s does not have it: %s", version, ", ".join(names))


def to_argv(fields: Mapping[str, Any], python: Path | None = None, owner: str = SERVER) -> list[str]:
    """The arguments of `python -m sglang.launch_server` for `ServerArgs` fields, or with `ROUTER` of
    `python -m sglang_router.launch_router` for `RouterArgs` fields, whose selectors are KEY=VALUE lists.

    Args:
        fields: As `server_arguments` or `router_arguments` returns them, and host, port and the like. None means: not
            given. A field that the version does not have is left out with one log line.
        python: Interpreter of SGLang's environment, whose version's spelling is used.
        owner: `SERVER` or `ROUTER`.

    Raises:
        ConfigError: A value cannot be said on that version's command line.
    """
    return _argv(owner, fields, flags_for({"engine_python": python}))


def router_arguments(args: Args) -> dict[str, Any]:
    """`RouterArgs` field -> value (field names without `router_`); complete but for host, ports and workers.

    Raises:
        ConfigError: A --router-* flag is unknown, malformed or belongs to slime.
    """
    flags = flags_for(args)
    forced = {"request_timeout_secs": args.sglang_router_request_timeout_secs}
    given = _settings(args, ROUTER, flags.router, ROUTER_OWNED)
    return _known(ROUTER_DEFAULTS, flags, ROUTER) | given | _known(forced, flags, ROUTER)


def _argv(owner: str, fields: Mapping[str, Any], flags: EngineFlags, where: str = "--") -> list[str]:
    """The words of every field that is not None; `where` begins what is said about one that has none."""
    argv: list[str] = []
    for name, value in _known({n: v for n, v in fields.items() if v is not None}, flags, owner).items():
        flag = flags.field(owner, name)
        assert flag is not None
        # Nothing says these, as it does not have to: a switch that is off, and a list without elements.
        if flag.default in (False, None, []) and (value is flag.default or (flag.nargs == "+" and not value)):
            continue
        try:
            first, *rest = words(flag, value)
        except ValueError as error:
            raise ConfigError(f"{where}{name if where.endswith(' ') else name.replace('_', '-')}: {error}") from None
        argv += [first.replace(owner.replace("_", "-"), "", 1), *rest]
    return argv
