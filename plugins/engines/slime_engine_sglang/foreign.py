"""Whose flags --sglang-* and --router-* are: what the entry points `slime.foreign_flags` of the engine return.

Imported at the start of every command, so everything that costs anything waits in `flag_list` until a flag is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from slime_core.config import ForeignFlags
from slime_core.config.settings import Entry

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
        lambda settings: _late("flag_list", "flags_for")(settings).server,
        prefixes=("sglang-", "no-sglang-"),
        used_by=USED_BY,
        chooses="rollout_engine",
        chosen_by=CHOSEN_BY,
        help_flag=HELP_FLAG,
        derives=_follows,
        check=_late("owned", "check_server_flags"),
    )


def router_flags() -> ForeignFlags:
    """`RouterArgs` of SGLang's router."""
    return ForeignFlags(
        "SGLang's router",
        lambda settings: _late("flag_list", "flags_for")(settings).router,
        prefixes=("router-",),
        used_by=USED_BY,
        chooses="rollout_engine",
        help_flag=HELP_FLAG,
        check=_late("owned", "check_router_flags"),
    )


def _late(module: str, name: str) -> Callable[..., Any]:
    """A function whose module is imported when it is called."""
    return lambda *given: getattr(import_module(f"slime_engine_sglang.{module}"), name)(*given)


def _follows(given: Mapping[str, Entry]) -> Mapping[str, tuple[Any, str]]:
    """SGLang's own way to say how many GPUs an engine has."""
    tensor, pipeline = given.get("sglang_tp_size"), given.get("sglang_pp_size")
    if tensor is None or not isinstance(tensor.value, int):
        return {}
    ranks = tensor.value * (pipeline.value if pipeline is not None and isinstance(pipeline.value, int) else 1)
    return {"rollout_num_gpus_per_engine": (ranks, "sglang_tp_size" + (" * sglang_pp_size" if pipeline else ""))}
