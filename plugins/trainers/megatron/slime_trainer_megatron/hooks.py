"""The places where a user's function or plugin may change Megatron, with THUDM/slime's signatures.

`hookspecs.py` declares the hooks. `--custom-model-provider-path` replaces the function that builds the model;
`trainer.py` loads it at its start, so that a wrong name or signature ends the run early. Every rank calls the hooks on
the trainer's device (`on_device`).
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
"""Role of a pass -> `store_prefix` of the hook before it: THUDM/slime's prefix of the columns that the pass fills."""


def model_provider(args: Args) -> Callable[..., Any] | None:
    """Return the function of `--custom-model-provider-path`, which builds the model of a pipeline stage.

    Its parameters are (pre_process, post_process[, vp_stage]).

    Raises:
        PluginError: The function cannot be found or has another signature.
    """
    spec = args.custom_model_provider_path
    if not spec:
        return None
    from slime_core.plugins.resolve import resolve
    from slime_core.workers.call import guarded

    flag = "--" + _PROVIDER.replace("_", "-")
    return guarded(resolve("megatron_model_providers", spec, origin=flag).obj, flag)
