"""The kinds of component: what each is called, which setting selects it and how slime calls it.

The table is data: discovery, the resolver, the signature check and `slime plugins` all read it, and none of them
branches on a kind. Adding a kind is adding a row. The plural is the key and the entry-point group is
`slime.<plural>`; the singular is what messages and distribution names (`slime-<singular>-<name>`) use.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from slime_core.errors import PluginNotFoundError

HOOK_GROUP = "slime.plugins"
"""Entry-point group of hook modules: told to all, never selected by name."""


@dataclass(frozen=True)
class Call:
    """One accepted way to be called."""

    positional: tuple[str, ...]
    """Names of the arguments, passed by position."""
    shown: str
    """The signature as error messages print it."""
    keywords: tuple[str, ...] = ()
    """Passed as well to callables that declare a parameter of that name."""
    named: tuple[str, ...] = ()
    """Always passed, by name."""
    marker: str | None = None
    """The call applies only to callables with a positional parameter of this name."""
    awaited: bool = False
    """The callable must be `async def`, or annotated to return an awaitable."""
    plain: bool = False
    """The callable must not be `async def`: nobody would await what it returns."""


@dataclass(frozen=True)
class Kind:
    """One row of the table."""

    name: str
    """Plural, e.g. "rewards"."""
    singular: str
    flags: tuple[str, ...]
    """Settings that select a component of this kind."""
    canonical: tuple[str, ...]
    """Attributes looked for in a `file.py` spec that names none, best first."""
    calls: tuple[Call, ...] = ()
    """Accepted calls of a function; empty when the kind takes classes only, or any function at all."""
    methods: Mapping[str, Call] = field(default_factory=dict)
    """Methods a class must have."""
    construct: Call | None = None
    """How a class is built; None when the kind takes functions only."""
    prefixes: Mapping[str, str] = field(default_factory=dict)
    """Prefix of a registered name -> `module:attr` of what wraps the component: `boxed_math` is `math` boxed."""

    @property
    def group(self) -> str:
        """Entry-point group."""
        return f"slime.{self.name}"


_BUILT_FROM_ARGS = Call(("args",), "(args)")

_SINGLE_REWARD = Call(("args", "sample"), "(args, sample[, evaluation], **kwargs) -> float", keywords=("evaluation",))
_BATCH_REWARD = Call(
    ("args", "samples"),
    "(args, samples[, evaluation], **kwargs) -> list[float]",
    keywords=("evaluation",),
    marker="samples",
)

_KINDS = (
    Kind(
        name="rewards",
        singular="reward",
        flags=("--rm-type", "--custom-rm-path"),
        canonical=("reward", "reward_func", "custom_rm", "batched_custom_rm"),
        calls=(_BATCH_REWARD, _SINGLE_REWARD),
        methods={
            "compute_reward": Call(
                ("prompts", "responses"), "(self, prompts, responses) -> list[float]", keywords=("evaluation",)
            )
        },
        construct=_BUILT_FROM_ARGS,
        prefixes={"boxed_": "slime_core.plugins.boxed:boxed"},
    ),
    Kind(
        name="generators",
        singular="generator",
        flags=("--custom-generate-function-path",),
        canonical=("generate",),
        calls=(
            Call(
                ("args", "sample", "sampling_params"),
                "async (args, sample, sampling_params[, evaluation][, context]) -> Sample | list[Sample]",
                keywords=("evaluation", "context"),
                awaited=True,
            ),
        ),
    ),
    Kind(
        name="buffers",
        singular="buffer",
        flags=("--buffer-filter-path",),
        canonical=("buffer_filter", "Buffer"),
        calls=(
            Call(
                ("args", "rollout_id", "buffer", "num_samples"),
                "(args, rollout_id, buffer, num_samples) -> list[Group]",
            ),
        ),
        methods={
            "begin_rollout": Call(("rollout_id", "weight_version"), "(self, rollout_id, weight_version) -> None"),
            "add": Call(("groups",), "(self, groups) -> None"),
            "take": Call(("num_groups",), "(self, num_groups) -> list[Group]"),
            "wants": Call(("prompt",), "(self, prompt) -> bool"),
            "observe": Call(("groups", "trained"), "(self, groups, trained) -> None"),
            "take_metrics": Call((), "(self) -> dict[str, float]"),
            "state_dict": Call((), "(self) -> dict"),
            "load_state_dict": Call(("state",), "(self, state) -> None"),
        },
        construct=_BUILT_FROM_ARGS,
    ),
    Kind(
        name="filters",
        singular="filter",
        flags=("--dynamic-sampling-filter-path",),
        canonical=("dynamic_filter", "dynamic_sampling_filter", "filter"),
        calls=(Call(("args", "samples"), "(args, samples, **kwargs) -> FilterDecision | bool", plain=True),),
    ),
    Kind(
        name="estimators",
        singular="estimator",
        flags=("--advantage-estimator",),
        canonical=("estimator", "compute_advantages"),
        calls=(Call(("args", "rollout_data"), "(args, rollout_data) -> None"),),
        methods={
            "shape_rewards": Call(("args", "inputs"), "(self, args, inputs) -> list[float]"),
            "advantages": Call(("args", "inputs"), "(self, args, inputs) -> Advantages"),
            "policy_loss": Call(("args", "inputs"), "(self, args, inputs) -> LossOutputs"),
        },
        construct=_BUILT_FROM_ARGS,
    ),
    Kind(
        name="models",
        singular="model",
        flags=("model_type in config.json of --hf-checkpoint",),
        canonical=("model",),
        calls=(Call(("hf",), "(hf) -> ModelConfig"),),
    ),
    Kind(
        name="data_sources",
        singular="data_source",
        flags=("--data-source-path",),
        canonical=("data_source", "DataSource"),
        methods={
            "get_samples": Call(("num_samples",), "(self, num_samples) -> list[Group]"),
            "add_samples": Call(("samples",), "(self, samples) -> None"),
        },
        construct=_BUILT_FROM_ARGS,
    ),
    Kind(
        name="rollouts",
        singular="rollout",
        flags=("--rollout-function-path", "--eval-function-path"),
        canonical=("generate_rollout", "rollout"),
        calls=(
            Call(
                ("args", "rollout_id", "data_source"),
                "(args, rollout_id, data_source, evaluation=False) -> RolloutFnTrainOutput | RolloutFnEvalOutput",
                keywords=("evaluation", "context"),
            ),
        ),
    ),
    Kind(
        name="losses",
        singular="loss",
        flags=("--loss-type",),
        canonical=("loss", "Loss"),
        methods={"bind": Call(("batch", "tensors", "denominators"), "(self, batch, tensors, denominators) -> LossFn")},
        construct=Call(("args", "estimator"), "(args, estimator)"),
    ),
    Kind(
        name="engines",
        singular="engine",
        flags=("--rollout-engine",),
        canonical=("engine", "Engine"),
        methods={
            "generate": Call(("input_ids", "sampling_params"), "async (self, input_ids, sampling_params, *, rid=None)"),
            "start": Call((), "async (self)"),
            "stop": Call((), "async (self)"),
        },
        construct=_BUILT_FROM_ARGS,
    ),
    Kind(
        name="trainers",
        singular="trainer",
        flags=("--train-backend",),
        canonical=("trainer", "Trainer"),
        methods={
            "train_step": Call(("batch", "micro_batches", "loss_fn"), "(self, batch, micro_batches, loss_fn)"),
            "log_probs": Call(("batch", "micro_batches"), "(self, batch, micro_batches, *, role='actor')"),
            "named_weights": Call((), "(self)"),
        },
        construct=Call(("args",), "(args[, role])", keywords=("role",)),
    ),
    Kind(
        name="recipes",
        singular="recipe",
        flags=("--prepare-path",),
        canonical=("prepare", "recipe"),
        calls=(Call(("args",), "(args) -> None"),),
    ),
    Kind(
        name="reward_post_processes",
        singular="reward_post_process",
        flags=("--custom-reward-post-process-path",),
        canonical=("post_process_rewards", "reward_post_process", "custom_reward_post_process"),
        calls=(Call(("args", "samples"), "(args, samples) -> (raw_rewards, rewards)", plain=True),),
    ),
    Kind(
        name="sample_converters",
        singular="sample_converter",
        flags=("--custom-convert-samples-to-train-data-path",),
        canonical=("convert_samples_to_train_data", "convert_samples"),
        calls=(Call(("args", "samples"), "(args, samples) -> dict", plain=True),),
    ),
    Kind(
        name="advantages",
        singular="advantage",
        flags=("--custom-advantage-function-path",),
        canonical=("compute_advantages", "compute_advantages_and_returns", "advantages"),
        calls=(Call(("args", "rollout_data"), "(args, rollout_data) -> None"),),
    ),
    Kind(
        name="sample_hooks",
        singular="sample_hook",
        flags=("--rollout-sample-hook-path",),
        canonical=("sample_hook", "rollout_sample_hook"),
        calls=(
            Call(
                ("args", "sample"),
                "[async] (args, sample[, rollout_id][, evaluation]) -> Sample | None",
                keywords=("rollout_id", "evaluation"),
            ),
        ),
    ),
    Kind(
        name="sample_filters",
        singular="sample_filter",
        flags=("--rollout-sample-filter-path",),
        canonical=("sample_filter", "rollout_sample_filter"),
        calls=(Call(("args", "groups"), "(args, groups) -> None", plain=True),),
    ),
    Kind(
        name="all_samples_processes",
        singular="all_samples_process",
        flags=("--rollout-all-samples-process-path",),
        canonical=("all_samples_process", "rollout_all_samples_process", "process_all_samples"),
        calls=(Call(("args", "all_groups", "data_source"), "(args, all_groups, data_source) -> None", plain=True),),
    ),
    Kind(
        name="rollout_logs",
        singular="rollout_log",
        flags=("--custom-rollout-log-function-path",),
        canonical=("log_rollout", "log_rollout_data", "custom_rollout_log"),
        calls=(
            Call(
                ("rollout_id", "args", "samples", "extra_metrics", "rollout_time"),
                "(rollout_id, args, samples, extra_metrics, rollout_time) -> bool",
                plain=True,
            ),
        ),
    ),
    Kind(
        name="eval_logs",
        singular="eval_log",
        flags=("--custom-eval-rollout-log-function-path",),
        canonical=("log_eval", "log_eval_rollout_data", "custom_eval_rollout_log"),
        calls=(
            Call(
                ("rollout_id", "args", "data", "extra_metrics"),
                "(rollout_id, args, data, extra_metrics) -> bool",
                plain=True,
            ),
        ),
    ),
    Kind(
        name="weight_post_writes",
        singular="weight_post_write",
        flags=("--custom-update-weight-post-write-path",),
        canonical=("post_write", "weight_post_write", "custom_update_weight_post_write"),
        calls=(
            Call(
                ("args", "version_dir", "rollout_engines"), "(args, version_dir, rollout_engines) -> None", plain=True
            ),
        ),
    ),
    Kind(
        name="corrections",
        singular="correction",
        flags=("--custom-tis-function-path",),
        canonical=("correction", "tis_function", "custom_tis_function", "compute_mis_weights_with_cp"),
        calls=(
            Call(
                (),
                "(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths)"
                " -> (pg_loss, loss_masks, metrics)",
                named=(
                    *("args", "pg_loss", "train_log_probs", "rollout_log_probs"),
                    *("loss_masks", "total_lengths", "response_lengths"),
                ),
            ),
        ),
        methods={"weigh": Call(("inputs",), "(self, inputs) -> CorrectionOutputs")},
        construct=_BUILT_FROM_ARGS,
    ),
    Kind(
        name="loss_reducers",
        singular="loss_reducer",
        flags=("--custom-pg-loss-reducer-function-path",),
        canonical=("reducer", "get_pg_loss_reducer", "pg_loss_reducer"),
        calls=(
            Call(
                ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
                "(total_lengths, response_lengths, loss_masks, calculate_per_token_loss[, args]) -> (tensor) -> scalar",
                keywords=("args",),
            ),
        ),
    ),
    Kind(
        name="custom_losses",
        singular="custom_loss",
        flags=("--custom-loss-function-path",),
        canonical=("custom_loss", "loss_function", "loss"),
        calls=(
            Call(
                ("args", "batch", "logits", "sum_of_sample_mean"),
                "(args, batch, logits, sum_of_sample_mean) -> (loss, dict of metrics)",
                plain=True,
            ),
        ),
    ),
    Kind(
        name="data_postprocesses",
        singular="data_postprocess",
        flags=("--rollout-data-postprocess-path",),
        canonical=("postprocess_rollout_data", "rollout_data_postprocess", "data_postprocess"),
        calls=(Call(("args", "rollout_id", "rollout_data"), "(args, rollout_id, rollout_data) -> None", plain=True),),
    ),
    Kind(
        name="functions",
        singular="function",
        flags=("every other --*-path flag",),
        canonical=(),
    ),
)

KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS}
"""Plural -> row."""


def kind_of(name: str) -> Kind:
    """The row of a plural or singular name. Raises PluginNotFoundError for another word."""
    for kind in _KINDS:
        if name in (kind.name, kind.singular):
            return kind
    close = difflib.get_close_matches(name, [k.name for k in _KINDS], n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise PluginNotFoundError(f"no plugin kind {name!r}.{hint} Kinds: {', '.join(sorted(KINDS))}")
