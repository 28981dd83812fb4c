"""Fallbacks for unset Megatron flags such as `args.context_parallel_size`: the values in Megatron's own `args`.

User code written for Megatron reads such attributes, with any trainer. `ForeignFlags.default_of` reads one attribute at
a time, so a run whose code reads none has no cost; this module imports neither torch nor Megatron. slime itself does
not read these defaults, since they are not the user's choice; `values.given` has the values that were given.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from slime_core.protocols import Args
from slime_trainer_megatron.arguments.fields import known_fields
from slime_trainer_megatron.arguments.flag_names import ALIASES, without_field
from slime_trainer_megatron.arguments.owned import FOR_RL, OWNED

SEQUENCE_LENGTH = 4096
"""Default of --seq-length in THUDM/slime; nothing is truncated to it."""

_sizes = attrgetter("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "world_size")


def default_of(args: Args, name: str) -> Any:
    """Return the value of an unset attribute.

    Args:
        args: The run's settings; the model's config.json replaces defaults of flags that were not given.
        name: Name of the attribute.

    Raises:
        LookupError: Megatron has no such argument.
    """
    if name in _same_as():
        return getattr(args, _same_as()[name])
    if name in ("world_size", "rank"):
        return int(os.environ.get(name.upper(), int(name == "world_size")))
    if name == "data_parallel_size":
        tensor, pipeline, context, processes = _sizes(args)
        return max(1, processes // (tensor * pipeline * context))
    default = _table()[name]
    of_model = _of_model(args.hf_checkpoint).get(name) if args.hf_checkpoint else None
    return default if of_model is None else of_model


@cache
def _same_as() -> dict[str, str]:
    """Return Megatron's attribute -> the field that has its value."""
    fields = known_fields().fields
    names = {name: field.name for field in fields.values() if field.kind != "bool" for name in field.names}
    return {
        name.replace("-", "_"): field
        for name, field in {**names, **ALIASES}.items()
        if field in fields and name.replace("-", "_") not in fields
    }


@cache
def _table() -> Mapping[str, Any]:
    fields = {name: field.default for name, field in known_fields().fields.items()}
    named = {
        name.replace("-", "_"): bool(flag.default) if flag.kind in ("switch", "toggle") else flag.default
        for name, flag in without_field().items()
    }
    ours = {name: value for name, (value, _) in OWNED.items() if name in fields}
    return {**named, **fields, **ours, **FOR_RL, "use_distributed_optimizer": True, "seq_length": SEQUENCE_LENGTH}


@cache
def _of_model(directory: str) -> Mapping[str, Any]:
    """Return the values of config.json under Megatron's names; empty if the file does not exist yet."""
    from slime_core.models.config import read_hf_config
    from slime_trainer_megatron.arguments.architecture import COMPARED

    if not (Path(directory) / "config.json").is_file():
        return {}
    config = read_hf_config(directory)
    text = config.get("text_config", config)
    names = {**COMPARED, "vocab_size": "vocab_size", "max_position_embeddings": "max_position_embeddings"}
    names["num_moe_experts"] = "num_experts" if "num_experts" in text else "n_routed_experts"
    return {name: text[known] for name, known in names.items() if isinstance(text.get(known), int | float)}
