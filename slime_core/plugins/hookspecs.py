"""Every hook that slime calls, except hooks of a single trainer (`hook_flags.py`).

A hook is called in all plugins; a component is one of N chosen by name. Write a module with functions of these names
marked `@slime_core.hookimpl`, with any subset of the parameters by name, and register the module in the entry-point
group `slime.plugins`. A function given by one of the `FLAGS` is an anonymous implementation: it is called with
THUDM/slime's positional arguments, after the implementations of all plugins.

Unless its docstring differs, a hook is a plain function, called in the process that leads the run, on the loop's
thread. Its return value is not used, and an exception ends the run with one line that names the hook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from slime_core.plugins.kind import Call, Kind
from slime_core.protocols.traits import EditTraits

if TYPE_CHECKING:
    from slime_core.config import Settings
    from slime_core.launch.drive import RunParts
    from slime_core.launch.prepare import Prepared
    from slime_core.learning.report import TrainedRollout
    from slime_core.plugins.registry import Registry
    from slime_core.protocols import Args
    from slime_core.protocols.command import Finding
    from slime_core.sample import Group, Sample

PROJECT = "slime"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# -- the run -------------------------------------------------------------------------------------------------


@hookspec(historic=True)
def slime_register_components(registry: Registry) -> None:
    """Register components, in every process: `registry.add_object("rewards", "mine", my_reward)`."""


@hookspec
def slime_configure(args: Args) -> None:
    """Check the final settings, in every process; raise ConfigError to stop before anything starts."""


@hookspec
def slime_check(settings: Settings) -> list[Finding] | None:
    """Return findings about the run that only `slime check` reports; start and write nothing."""


@hookspec
def slime_preflight(run: Prepared) -> list[Finding] | None:
    """Return findings about a run before it starts, and for `slime check`; an error ends the run. Write nothing."""


@hookspec
def slime_run_start(args: Args, run_dir: Path) -> None:
    """Act at the start of a run: the run directory exists, nothing is loaded yet."""


@hookspec
def slime_loop(parts: RunParts) -> Callable[..., Any] | None:
    """Return an async function to run in place of `slime_core.loop.train`, with the same arguments, or None.

    Without `--async` it must not wait for anything that an event loop turns.
    """


@hookspec
def slime_step_end(rollout_id: int, metrics: Mapping[str, float]) -> None:
    """Act after a rollout has been trained on."""


@hookspec
def slime_weights_updated(weight_version: int) -> None:
    """Act when all engines serve this weight version."""


@hookspec
def slime_checkpoint_saved(path: Path, rollout_id: int) -> None:
    """Act when a checkpoint is complete and is the latest."""


@hookspec
def slime_log_metrics(step: int, metrics: Mapping[str, float]) -> None:
    """Record metrics (JSONL, TensorBoard, a dashboard)."""


@hookspec
def slime_save_state() -> dict[str, Any] | None:
    """Return state to store in a checkpoint as JSON values, `{"<your distribution>": {...}}`, or None."""


@hookspec
def slime_load_state(state: Mapping[str, Any]) -> None:
    """Load state when a run is resumed: `state` merges all plugins' states; read only your own key."""


@hookspec
def slime_run_end(error: BaseException | None) -> None:
    """Act at the end of a run, for every cause; `error` is the exception that ended the run, or None.

    With `--launcher ray` this hook is also called in the actors that generate and train, with `error` None, to finish
    work that another hook began there. `slime_run_start` is not called in these actors.
    """


# -- a rollout -----------------------------------------------------------------------------------------------


@hookspec
def slime_sample_generated(args: Args, sample: Sample, rollout_id: int | None, evaluation: bool) -> Sample | None:
    """Edit or replace a generated sample before it has a reward, in training and in evaluation.

    Called in the process that generates, in its event loop; may be `async`, with the deadline `--rollout-timeout`.
    Called once for each finished sample, and for each fan-out sibling. Write to the sample, or return another sample,
    which the next implementation receives. An exception fails the sample, not the run. A change of the training data
    (tokens, log-probs, mask, ...) fails the sample too, unless the hook declares `EditTraits(edits_samples=True)`.
    """


@hookspec
def slime_filter_samples(args: Args, groups: list[Group]) -> None:
    """Mark samples of a generated rollout that must not be trained on; called for every rollout function.

    Called in the process that generates. Set `sample.remove_sample`: these samples are masked, and their rewards are
    left out of their group's statistics (THUDM/slime counts them). A change of tokens, log-probs or masks ends the run,
    unless the hook declares `EditTraits(edits_samples=True)`. Not called for samples of `--load-debug-rollout-data`.
    """


@hookspec
def slime_process_all_samples(
    args: Args, all_groups: list[Group], data_source: Any, reasons: Mapping[int, str]
) -> None:
    """Process all groups of a rollout after `slime_filter_samples`, including dropped and failed groups.

    Called in the process that generates. Groups are ordered by `group_index`, without groups returned to the data
    source; a custom rollout function's groups are those that it returned. `data_source` is the object itself
    (THUDM/slime passes its `get_samples`). `reasons` maps the `group_index` of each dropped group to the reason.
    """


@hookspec
def slime_log_rollout(
    rollout_id: int, args: Args, samples: list[Sample], extra_metrics: dict[str, float], rollout_time: float
) -> bool | None:
    """Add to the metrics of a rollout, or replace them; `rollout_time` is in seconds.

    Called in the process that generates. The final content of `extra_metrics` is recorded. All implementations are
    called; if any returns True, slime's own metrics of this rollout are left out.
    """


@hookspec
def slime_log_eval(
    rollout_id: int, args: Args, data: dict[str, dict[str, Any]], extra_metrics: dict[str, float]
) -> bool | None:
    """Add to the metrics of an evaluation, or replace them; `data` is {data set: {"rewards", "truncated", "samples"}}.

    Called in the process that generates. `extra_metrics` and the return value are as in `slime_log_rollout`.
    """


@hookspec
def slime_rollout_end(rollout_id: int, groups: list[Group], metrics: dict[str, float]) -> None:
    """Act after rewards, filters and log functions of a rollout; may add to `metrics`."""


# -- training ------------------------------------------------------------------------------------------------


@hookspec
def slime_train_data(args: Args, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Edit the training data after the advantages are computed, before the first optimizer step.

    Called in every trainer process, with its share of the rollout. `rollout_data` has THUDM/slime's columns, with one
    row per sample; change them in place and keep their shapes. If there is an implementation, the trainer computes its
    own log-probs first.
    """


@hookspec
def slime_rollout_trained(args: Args, trained: TrainedRollout) -> None:
    """Inspect a rollout after its optimizer steps; change nothing.

    Called in every trainer process, with the whole batch, the process's share and the steps
    (`learning.report.TrainedRollout`). `trained.rows("advantages", "log_probs")` gathers the optimizer's inputs of all
    samples over the ranks. It is a collective call: call it in every process, or the processes wait for each other
    until `--train-timeout`.
    """


@hookspec
def slime_weights_written(args: Args, version_dir: str, rollout_engines: list[Any]) -> None:
    """Act when the files of a weight version are complete, before any engine reads them (`disk` and `delta`).

    Called in the trainer's rank 0 (THUDM/slime: on every rank). `rollout_engines` is a list with the rollout engine.
    """


FLAGS = (
    Kind(
        name="slime_sample_generated",
        traits=EditTraits,
        word="sample_hook",
        flags=("--rollout-sample-hook-path",),
        canonical=("sample_hook", "rollout_sample_hook"),
        calls=(Call("[async] (args, sample[, rollout_id][, evaluation]) -> Sample | None"),),
    ),
    Kind(
        name="slime_filter_samples",
        traits=EditTraits,
        word="sample_filter",
        flags=("--rollout-sample-filter-path",),
        canonical=("sample_filter", "rollout_sample_filter"),
        calls=(Call("(args, groups) -> None"),),
    ),
    Kind(
        name="slime_process_all_samples",
        traits=EditTraits,
        word="all_samples_process",
        flags=("--rollout-all-samples-process-path",),
        canonical=("all_samples_process", "rollout_all_samples_process", "process_all_samples"),
        calls=(Call("(args, all_groups, data_source[, reasons]) -> None"),),
    ),
    Kind(
        name="slime_log_rollout",
        word="rollout_log",
        flags=("--custom-rollout-log-function-path",),
        canonical=("log_rollout", "log_rollout_data", "custom_rollout_log"),
        calls=(Call("(rollout_id, args, samples, extra_metrics, rollout_time) -> bool"),),
    ),
    Kind(
        name="slime_log_eval",
        word="eval_log",
        flags=("--custom-eval-rollout-log-function-path",),
        canonical=("log_eval", "log_eval_rollout_data", "custom_eval_rollout_log"),
        calls=(Call("(rollout_id, args, data, extra_metrics) -> bool"),),
    ),
    Kind(
        name="slime_train_data",
        word="data_postprocess",
        flags=("--rollout-data-postprocess-path",),
        canonical=("postprocess_rollout_data", "rollout_data_postprocess", "data_postprocess"),
        calls=(Call("(args, rollout_id, rollout_data) -> None"),),
        trains=True,
    ),
    Kind(
        name="slime_weights_written",
        word="weight_post_write",
        flags=("--custom-update-weight-post-write-path",),
        canonical=("post_write", "weight_post_write", "custom_update_weight_post_write"),
        calls=(Call("(args, version_dir, rollout_engines) -> None"),),
        trains=True,
    ),
)
"""Flags that name a function as a hook, called with THUDM/slime's arguments; checked before anything starts."""
