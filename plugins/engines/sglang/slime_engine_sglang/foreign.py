"""Whose flags --sglang-* and --router-* are: what the entry points `slime.foreign_flags` of the engine return.

Imported at the start of every command, so everything that costs anything waits in `flag_list` until a flag is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime_core.config import ForeignFlags
from slime_core.config.origins import Entry
from slime_core.config.passthrough import FlagList
from slime_core.protocols import Args

HELP_FLAG = "help-sglang"
USED_BY = ("sglang",)
CHOSEN_BY = (
    ("rollout_num_gpus",),
    ("rollout_num_gpus_per_engine",),
    ("prefill_num_servers",),
    ("sglang_config",),
    ("colocate", "actor_num_gpus_per_node"),
)
"""GPUs for inference, in a script for GPUs those that training shares, and what only SGLang's servers have."""


def server_flags() -> ForeignFlags:
    """SGLang's `ServerArgs`."""
    return ForeignFlags(
        owner="SGLang",
        prefixes=("sglang-", "no-sglang-"),
        used_by=USED_BY,
        chooses="rollout_engine",
        chosen_by=CHOSEN_BY,
        listing=_server_list,
        abbreviates=True,
        help_flag=HELP_FLAG,
        derives=_follows,
        check=_check_server,
    )


def router_flags() -> ForeignFlags:
    """`RouterArgs` of SGLang's router."""
    return ForeignFlags(
        owner="SGLang's router",
        prefixes=("router-",),
        used_by=USED_BY,
        chooses="rollout_engine",
        listing=_router_list,
        help_flag=HELP_FLAG,
        check=_check_router,
    )


def _server_list(settings: Mapping[str, Any]) -> FlagList:
    from slime_engine_sglang.flag_list import SERVER, flags_for

    return _with_owned(flags_for(settings).server, SERVER)


def _router_list(settings: Mapping[str, Any]) -> FlagList:
    from slime_engine_sglang.flag_list import ROUTER, flags_for

    return _with_owned(flags_for(settings).router, ROUTER)


def _with_owned(flags: FlagList, prefix: str) -> FlagList:
    """The help of a flag that is slime's says so; one whose name is a setting of slime's own is left out."""
    from slime_core.config.spec import flag_specs
    from slime_engine_sglang.flag_list import SERVER
    from slime_engine_sglang.owned import ROUTER_OWNED, SERVER_OWNED

    owned = {prefix + name: text for name, text in (SERVER_OWNED if prefix == SERVER else ROUTER_OWNED).items()}
    told = (
        replace(flag, help=f"Slime's to set: {owned[flag.attribute]}.", default=None)
        if flag.attribute in owned
        else flag
        for flag in flags.flags
        if flag.attribute not in flag_specs()
    )
    return FlagList(tuple(told), flags.version)


def _follows(given: Mapping[str, Entry]) -> Mapping[str, tuple[Any, str]]:
    """SGLang's own way to say how many GPUs an engine has."""
    tensor, pipeline = given.get("sglang_tp_size"), given.get("sglang_pp_size")
    if tensor is None or not isinstance(tensor.value, int):
        return {}
    ranks = tensor.value * (pipeline.value if pipeline is not None and isinstance(pipeline.value, int) else 1)
    return {"rollout_num_gpus_per_engine": (ranks, "sglang_tp_size" + (" * sglang_pp_size" if pipeline else ""))}


def _check_server(args: Args, given: Mapping[str, Entry]) -> Sequence[str]:
    from slime_engine_sglang.owned import check_server_flags

    return check_server_flags(args, given)


def _check_router(args: Args, given: Mapping[str, Entry]) -> Sequence[str]:
    from slime_engine_sglang.owned import check_router_flags

    return check_router_flags(args, given)
