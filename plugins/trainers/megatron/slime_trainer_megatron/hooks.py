"""The places where a user's function or plugin may reach into Megatron, with THUDM/slime's signatures.

The hooks are declared in `hookspecs.py`; `--custom-model-provider-path` replaces what builds the model, and is found
when `trainer.py` starts, so that a wrong name or signature ends the run before. Every rank calls them, and calls into
Megatron made inside are on the trainer's device (`on_device`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime_core.protocols import Args
from slime_trainer_megatron.hookspecs import FLAGS

_PROVIDER = "custom_model_provider_path"

HOOK_SETTINGS = tuple(row.setting for row in FLAGS)
"""Settings that name such a function."""

STORE_PREFIXES = {"actor": "", "ref": "ref_", "teacher": "teacher_", "old_actor": "old_actor_"}
"""Role of a pass -> what the hook before it is told; THUDM/slime's prefixes of the columns that the pass fills."""


def model_provider(args: Args) -> Callable[..., Any] | None:
    """`--custom-model-provider-path`: (pre_process, post_process[, vp_stage]) -> the model of a pipeline stage.

    Raises:
        PluginError: It cannot be found or has another signature.
    """
    spec = args.custom_model_provider_path
    if not spec:
        return None
    from slime_core.plugins.boundary import guarded
    from slime_core.plugins.resolve import resolve

    flag = "--" + _PROVIDER.replace("_", "-")
    return guarded(resolve("megatron_model_providers", spec, origin=flag).obj, flag)
