"""Raise an ImportError that names the replacement for a part of THUDM/slime that this package lacks.

`install` adds a finder after all others, so it is called only for modules that no finder has. `names(__name__)` makes
the `__getattr__` of a module. `from slime.x import y` raises ImportError, while `slime.x.y` raises AttributeError, so
`hasattr` and `getattr` with a default work.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

TABLE = "docs/how-to/run-code-written-for-slime.md lists what there is"

_BACKENDS = "trainers and engines are plugins (--train-backend, --rollout-engine; slime_core.protocols)"
NEAREST = {
    "slime.agent": "slime_agent_base_url: the generator `agent` (docs/how-to/agents-by-base-url.md)",
    "slime.agent.harness.common.run_agent": "slime.agent.sandbox.exec_and_wait",
    "slime.agent.harness.common.run_command": "slime.agent.sandbox.exec_and_wait",
    "slime.agent.trajectory_manager": "slime.agent.trajectory.TrajectoryManager",
    "slime.backends": _BACKENDS,
    "slime.backends.megatron_utils": "slime.backends.megatron_utils.loss and .cp_utils are there; of the rest: "
    + _BACKENDS,
    "slime.backends.megatron_utils.data": "TrainBatch (slime_core.sample) and --rollout-data-postprocess-path",
    "slime.backends.sglang_utils": "--rollout-engine sglang, and `slime engines plan`",
    "slime.observability": "hooks of the entry-point group slime.plugins (slime_core.hookimpl), and metrics.jsonl",
    "slime.observability.logging_utils": "return metrics in RolloutFnTrainOutput, or a hook slime_rollout_end",
    "slime.ray": "`slime train` runs the loop; --launcher ray puts its stages into actors (slime_launcher_ray)",
    "slime.rollout.forge_load": "--load-debug-rollout-data PATH",
    "slime.rollout.generate_hub": "--custom-generate-function-path NAME; `slime plugins list --kind generators`",
    "slime.router": "--rollout-engine sglang starts a router; --rollout-engine http talks to one that runs",
    "slime.utils.arguments": "flags are typed settings: `slime config show`, slime_core.config",
    "slime.utils.distributed_utils": "slime_core.ops.masked_whiten takes an all_reduce",
    "slime.utils.health_monitor": "servers of --rollout-engine sglang are watched and started again by themselves",
    "slime.utils.logging_utils": "--custom-rollout-log-function-path, or a hook slime_rollout_end",
    "slime.utils.ray_utils": "--launcher ray; slime_launcher_ray",
    "slime.utils.seqlen_balancing": "slime_core.learning.packing",
    "slime.utils.dp_schedule": "slime_core.learning.packing",
    "slime.utils.flops_utils": "slime_core.models.family",
    "slime.utils.tensorboard_utils": "--use-tensorboard, or a hook slime_rollout_end",
    "slime.utils.tracking_utils": "a hook slime_rollout_end or slime_step_end",
    "slime.utils.wandb_utils": "a hook slime_rollout_end or slime_step_end that logs to wandb",
    "slime.utils.misc.exec_command": "subprocess.run",
    "slime.utils.processing_utils.process_vision_info": "--multimodal-keys; the data source reads images",
    "slime.utils.types.MultimodalType": "--multimodal-keys; images are the only type",
    "slime.utils.types.MultimodalTypes": "--multimodal-keys; images are the only type",
    "slime.utils.data.process_rollout_data": "TrainBatch (slime_core.sample), made by slime_core.rollout.batch",
    "slime.utils.http_utils.run_router": "--rollout-engine sglang starts one; --sglang-router-ip, -port name another",
}
"""Module, package or `module.name` -> replacement; the longest matching entry is shown."""


def hint(name: str) -> str:
    """Return the replacement for `name`, and the page that lists all of them."""
    parts = name.split(".")
    found = (NEAREST.get(".".join(parts[:end])) for end in range(len(parts), 1, -1))
    nearest = next((text for text in found if text), None)
    return f"nearest: {nearest}. {TABLE}" if nearest else TABLE


class Finder(MetaPathFinder):
    """The last finder, which gets only modules that are in no `slime` package."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raise ImportError for a submodule of `slime`; leave everything else alone."""
        if fullname.startswith("slime."):
            raise ImportError(f"slime-compat has no {fullname}; {hint(fullname)}", name=fullname)


def install() -> None:
    """Add the finder after all others, once."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())


def names(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of `module`, which raises for every name that the module does not define."""

    def missing(name: str) -> Any:
        message = f"slime-compat's {module} has no {name!r}; {hint(f'{module}.{name}')}"
        caller = sys._getframe(1)
        is_import = caller.f_lasti >= 0 and caller.f_code.co_code[caller.f_lasti] == dis.opmap["IMPORT_FROM"]
        if is_import:
            raise ImportError(message, name=module)
        raise AttributeError(message)

    return missing


def plugin(module: str, wanted_by: str) -> ModuleType:
    """Import a plugin's module. Raises an ImportError that says how to install it."""
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        reason = "is not installed" if f"{module}.".startswith(f"{error.name}.") else f"lacks {error.name!r}"
        raise ImportError(
            f"{wanted_by} needs {module} of slime-rl, which {reason}; type: pip install slime-rl", name=module
        ) from error
