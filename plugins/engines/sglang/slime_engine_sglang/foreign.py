"""Whose flags --sglang-* and --router-* are: what the entry points `slime.foreign_flags` of the engine return.

Imported at the start of every command, so everything that costs anything waits in `flag_list` until a flag is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.config import FlagParser, ForeignFlags
from slime_core.config.origins import Entry
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
        "SGLang",
        _server_list,
        prefixes=("sglang-", "no-sglang-"),
        used_by=USED_BY,
        chooses="rollout_engine",
        chosen_by=CHOSEN_BY,
        help_flag=HELP_FLAG,
        derives=_follows,
        check=_check_server,
    )


def router_flags() -> ForeignFlags:
    """`RouterArgs` of SGLang's router."""
    return ForeignFlags(
        "SGLang's router",
        _router_list,
        prefixes=("router-",),
        used_by=USED_BY,
        chooses="rollout_engine",
        help_flag=HELP_FLAG,
        check=_check_router,
    )


def _server_list(settings: Mapping[str, Any]) -> FlagParser:
    from slime_engine_sglang.flag_list import flags_for

    return flags_for(settings).server


def _router_list(settings: Mapping[str, Any]) -> FlagParser:
    from slime_engine_sglang.flag_list import flags_for

    return flags_for(settings).router


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
