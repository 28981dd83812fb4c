"""Every hook slime calls: what a hook author reads, and all of it but those of one trainer (`hook_flags.py`).

A hook is told to all plugins, in contrast to a component, which is one of N chosen by name. Write a module with
functions of these names marked `@slime_core.hookimpl`, taking any subset of the parameters by name, and name it in the
entry-point group `slime.plugins`. A function given to one of the `FLAGS` is such an implementation too: an anonymous
one, called with THUDM/slime's positional arguments, after those of all plugins.

Unless a hook says otherwise it is a plain function in the process that leads the run, on the loop's thread; what it
returns is not used, and what it raises ends the run with one line that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from slime_core.plugins.kind import Call, HookFlag
from slime_core.protocols.traits import EditTraits

if TYPE_CHECKING:
    from slime_core.config import Settings
    from slime_core.launch.findings import Finding
    from slime_core.launch.prepare import Prepared
    from slime_core.learning.report import TrainedRollout
    from slime_core.plugins.registry import Registry
    from slime_core.protocols import Args
    from slime_core.types import Group, Sample

PROJECT = "slime"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# -- the run -------------------------------------------------------------------------------------------------


@hookspec(historic=True)
def slime_register_components(registry: Registry) -> None:
    """Names are collected, in every process: `registry.add_object("rewards", "mine", my_reward)` adds one."""


@hookspec
def slime_configure(args: Args) -> None:
    """Settings are final, in every process; raise ConfigError to stop before anything starts."""


@hookspec
def slime_check(settings: Settings) -> list[Finding] | None:
    """What `slime check` alone is to say of the run; nothing may be started or written."""


@hookspec
def slime_preflight(run: Prepared) -> list[Finding] | None:
    """What is found of a run before it starts, and by `slime check`; an error ends it. Nothing may be written."""


@hookspec
def slime_run_start(args: Args, run_dir: Path) -> None:
    """The run directory exists; nothing is loaded yet."""


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
    """Metrics are to be recorded (JSONL, TensorBoard, a dashboard)."""


@hookspec
def slime_save_state() -> dict[str, Any] | None:
    """A checkpoint is written: state for it as JSON values, `{"<your distribution>": {...}}`, or None."""


@hookspec
def slime_load_state(state: Mapping[str, Any]) -> None:
    """A run is resumed: the merged state of all plugins; take your own key and ignore the others."""


@hookspec
def slime_run_end(error: BaseException | None) -> None:
    """The run is over, on every way out; `error` is what ended it, or None.

    With `--launcher ray` also in the actors that generate and train, which are told of no error: what another hook has
    begun there is to be finished. They have not been told of the run's start.
    """


# -- a rollout -----------------------------------------------------------------------------------------------


@hookspec
def slime_sample_generated(args: Args, sample: Sample, rollout_id: int | None, evaluation: bool) -> Sample | None:
    """A sample is generated and has no reward yet, in training and in evaluation.

    In the process that generates, in its event loop; may be `async`, with the deadline `--rollout-timeout`. Finished
    samples only, once each, fan-out siblings one by one. Write to the sample, or return the one to go on with, which
    the next implementation gets. What it raises fails the sample, and not the run; so does a change of what is trained
    on (tokens, log-probs, mask, ...), unless it declares `EditTraits(edits_samples=True)`.
    """


@hookspec
def slime_filter_samples(args: Args, groups: list[Group]) -> None:
    """A rollout is generated, whatever function made it: mark samples that are not to be trained on.

    In the process that generates. Set `sample.remove_sample`: such samples are masked, and their rewards are outside
    their group's statistics (THUDM/slime counts them). A change of tokens, log-probs or masks ends the run, unless it
    declares `EditTraits(edits_samples=True)`. Not called for samples of `--load-debug-rollout-data`.
    """


@hookspec
def slime_process_all_samples(
    args: Args, all_groups: list[Group], data_source: Any, reasons: Mapping[int, str]
) -> None:
    """After `slime_filter_samples`: all groups of the rollout, those that were dropped or failed too.

    In the process that generates. Ordered by `group_index`, without those given back; from a rollout function of your
    own, the groups it returned. `data_source` is the object itself (THUDM/slime hands over its `get_samples`);
    `reasons` has the `group_index` of each group that was dropped, with why.
    """


@hookspec
def slime_log_rollout(
    rollout_id: int, args: Args, samples: list[Sample], extra_metrics: dict[str, float], rollout_time: float
) -> bool | None:
    """The metrics of a rollout are made; `rollout_time` in seconds.

    In the process that generates. What is in `extra_metrics` afterwards is recorded. True, from any implementation,
    leaves out slime's own metrics of this rollout; all are called.
    """


@hookspec
def slime_log_eval(
    rollout_id: int, args: Args, data: dict[str, dict[str, Any]], extra_metrics: dict[str, float]
) -> bool | None:
    """The metrics of an evaluation are made, of `{data set: {"rewards", "truncated", "samples"}}`.

    In the process that generates. `extra_metrics` and True are as in `slime_log_rollout`.
    """


@hookspec
def slime_rollout_end(rollout_id: int, groups: list[Group], metrics: dict[str, float]) -> None:
    """After rewards, filters and log functions; may add to `metrics`."""


# -- training ------------------------------------------------------------------------------------------------


@hookspec
def slime_train_data(args: Args, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Advantages are known, and no step has been taken: the last word on the data.

    In every trainer process, on its share of the rollout. `rollout_data` has THUDM/slime's columns, with one row per
    sample; change them in place, their shapes stay. With an implementation the trainer computes its own log-probs
    first.
    """


@hookspec
def slime_rollout_trained(args: Args, trained: TrainedRollout) -> None:
    """The optimizer steps of a rollout are taken: to look at, not to change.

    In every trainer process, with the whole batch, its own share and the steps (`learning.report.TrainedRollout`). What
    the optimizer was given of all samples comes by `trained.rows("advantages", "log_probs")`, gathered over the ranks
    when asked for: call it in every process alike, or they wait for one another until `--train-timeout`.
    """


@hookspec
def slime_weights_written(args: Args, version_dir: str, rollout_engines: list[Any]) -> None:
    """The files of a weight version are complete, and no engine reads them yet (`disk` and `delta`).

    In the trainer's rank 0 (THUDM/slime calls it on every rank). `rollout_engines` is a list with the rollout engine.
    """


FLAGS = (
    HookFlag(
        name="slime_sample_generated",
        traits=EditTraits,
        word="sample_hook",
        flags=("--rollout-sample-hook-path",),
        canonical=("sample_hook", "rollout_sample_hook"),
        calls=(Call("[async] (args, sample[, rollout_id][, evaluation]) -> Sample | None"),),
    ),
    HookFlag(
        name="slime_filter_samples",
        traits=EditTraits,
        word="sample_filter",
        flags=("--rollout-sample-filter-path",),
        canonical=("sample_filter", "rollout_sample_filter"),
        calls=(Call("(args, groups) -> None", plain=True),),
    ),
    HookFlag(
        name="slime_process_all_samples",
        traits=EditTraits,
        word="all_samples_process",
        flags=("--rollout-all-samples-process-path",),
        canonical=("all_samples_process", "rollout_all_samples_process", "process_all_samples"),
        calls=(Call("(args, all_groups, data_source[, reasons]) -> None", plain=True),),
    ),
    HookFlag(
        name="slime_log_rollout",
        word="rollout_log",
        flags=("--custom-rollout-log-function-path",),
        canonical=("log_rollout", "log_rollout_data", "custom_rollout_log"),
        calls=(Call("(rollout_id, args, samples, extra_metrics, rollout_time) -> bool", plain=True),),
    ),
    HookFlag(
        name="slime_log_eval",
        word="eval_log",
        flags=("--custom-eval-rollout-log-function-path",),
        canonical=("log_eval", "log_eval_rollout_data", "custom_eval_rollout_log"),
        calls=(Call("(rollout_id, args, data, extra_metrics) -> bool", plain=True),),
    ),
    HookFlag(
        name="slime_train_data",
        word="data_postprocess",
        flags=("--rollout-data-postprocess-path",),
        canonical=("postprocess_rollout_data", "rollout_data_postprocess", "data_postprocess"),
        calls=(Call("(args, rollout_id, rollout_data) -> None", plain=True),),
        trains=True,
    ),
    HookFlag(
        name="slime_weights_written",
        word="weight_post_write",
        flags=("--custom-update-weight-post-write-path",),
        canonical=("post_write", "weight_post_write", "custom_update_weight_post_write"),
        calls=(Call("(args, version_dir, rollout_engines) -> None", plain=True),),
        trains=True,
    ),
)
"""Flags whose function implements a hook, called with THUDM/slime's arguments; checked before anything starts."""
