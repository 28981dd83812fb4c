"""Every hook slime calls: what a hook author reads, and all of it.

A hook is told to all plugins, in contrast to a component, which is one of N chosen by name. Write a module with
functions of these names marked `@slime_core.hookimpl`, taking any subset of the parameters, and name it in the
entry-point group `slime.plugins`. Hooks are plain functions on the loop's thread: what one raises ends the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from slime_core.config import Settings
    from slime_core.launch.findings import Finding
    from slime_core.plugins.registry import Registry
    from slime_core.protocols import Args
    from slime_core.types import Group

PROJECT = "slime"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(historic=True)
def slime_register_components(registry: Registry) -> None:
    """Add named components: `registry.add_object("rewards", "mine", my_reward)`."""


@hookspec
def slime_configure(args: Args) -> None:
    """Check the final settings; raise ConfigError to stop before any process starts."""


@hookspec
def slime_check(settings: Settings) -> list[Finding] | None:
    """What `slime check` is to say of the run besides its own findings; nothing may be started or written."""


@hookspec
def slime_run_start(args: Args, run_dir: Path) -> None:
    """The run directory exists; nothing is loaded yet."""


@hookspec
def slime_rollout_end(rollout_id: int, groups: list[Group], metrics: dict[str, float]) -> None:
    """After rewards and filters; may add to `metrics`."""


@hookspec
def slime_step_end(rollout_id: int, metrics: Mapping[str, float]) -> None:
    """The rollout has been trained on."""


@hookspec
def slime_weights_updated(weight_version: int) -> None:
    """All engines serve this version."""


@hookspec
def slime_checkpoint_saved(path: Path, rollout_id: int) -> None:
    """The checkpoint is complete and the latest pointer names it."""


@hookspec
def slime_log_metrics(step: int, metrics: Mapping[str, float]) -> None:
    """Record metrics (JSONL, TensorBoard, a dashboard)."""


@hookspec
def slime_save_state() -> dict[str, Any] | None:
    """State for the checkpoint, as JSON values: `{"<your distribution>": {...}}`, or None."""


@hookspec
def slime_load_state(state: Mapping[str, Any]) -> None:
    """The merged state of all plugins, on resume; take your own key and ignore the others."""


@hookspec
def slime_run_end(error: BaseException | None) -> None:
    """The run is over; `error` is what ended it, or None. Runs on every way out."""
