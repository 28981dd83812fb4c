"""The kinds of component that a run is made of, and the flags that take a function, one row each."""

from __future__ import annotations

from slime_core.plugins.kind import BUILT_BY_NAME, BUILT_FROM_ARGS, Call, FunctionFlag, Kind
from slime_core.protocols import (
    EngineTraits,
    GenerateTraits,
    RewardTraits,
    RolloutTraits,
    TrainerTraits,
    TransportTraits,
)

_SINGLE_REWARD = Call(("args", "sample"), "(args, sample[, evaluation], **kwargs) -> float", keywords=("evaluation",))
_BATCH_REWARD = Call(
    ("args", "samples"),
    "(args, samples[, evaluation], **kwargs) -> list[float]",
    keywords=("evaluation",),
    marker="samples",
)

COMPONENTS = (
    # -- what makes, scores, chooses and reports samples, and what commands begin with
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
        construct=BUILT_BY_NAME,
        traits=RewardTraits,
        prefixes={"boxed_": "slime_core.plugins.boxed:boxed"},
    ),
    Kind(
        name="generators",
        singular="generator",
        flags=("--custom-generate-function-path",),
        traits=GenerateTraits,
        canonical=("generate",),
        calls=(
            Call(
                ("args", "sample", "sampling_params"),
                "async (args, sample, sampling_params[, evaluation][, context]) -> Sample | list[Sample]",
                keywords=("evaluation", "context"),
                awaited=True,
            ),
            Call(
                ("args", "samples"),
                "async (args, samples[, sampling_params][, evaluation][, context]) -> list[Sample]",
                keywords=("sampling_params", "evaluation", "context"),
                marker="samples",
                awaited=True,
            ),
        ),
    ),
    Kind(
        name="tools",
        singular="tool",
        flags=("--tools-path",),
        canonical=("tools", "tool"),
        lists=True,
    ),
    Kind(
        name="tool_parsers",
        singular="tool_parser",
        flags=("--tool-call-parser",),
        canonical=("ToolParser", "tool_parser"),
        methods={
            "parse": Call(("text", "tools"), "(self, text, tools=(), *, reasoning_open=False) -> ParsedTurn"),
            "render": Call(("calls",), "(self, calls) -> str"),
            "claims": Call(("chat_template",), "(self, chat_template) -> bool"),
        },
        construct=Call((), "()"),
    ),
    Kind(
        name="environments",
        singular="environment",
        flags=("--environment-path",),
        canonical=("Environment", "environment"),
        methods={
            "reset": Call(("sample",), "(self, sample) -> text, chat messages or None"),
            "step": Call(("action",), "(self, action[, turn]) -> slime_core.Step", keywords=("turn",)),
            "close": Call((), "(self) -> None"),
        },
        construct=BUILT_BY_NAME,
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
            Call(("args", "buffer", "num_samples"), "(args, buffer, num_samples) -> list[Sample]"),
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
        construct=BUILT_BY_NAME,
    ),
    Kind(
        name="filters",
        singular="filter",
        flags=("--dynamic-sampling-filter-path",),
        canonical=("dynamic_filter", "dynamic_sampling_filter", "filter"),
        calls=(Call(("args", "samples"), "(args, samples, **kwargs) -> FilterDecision | bool", plain=True),),
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
        construct=BUILT_BY_NAME,
    ),
    Kind(
        name="rollouts",
        singular="rollout",
        flags=("--rollout-function-path", "--eval-function-path"),
        traits=RolloutTraits,
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
        name="engines",
        singular="engine",
        flags=("--rollout-engine",),
        traits=EngineTraits,
        canonical=("engine", "Engine"),
        methods={
            "generate": Call(("input_ids", "sampling_params"), "async (self, input_ids, sampling_params, *, rid=None)"),
            "start": Call((), "async (self)"),
            "stop": Call((), "async (self)"),
        },
        construct=BUILT_FROM_ARGS,
    ),
    Kind(
        name="recipes",
        singular="recipe",
        flags=("--prepare-path",),
        canonical=("prepare", "recipe"),
        calls=(Call(("args",), "(args) -> None"),),
    ),
    # -- what becomes of samples in the trainer
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
        construct=BUILT_FROM_ARGS,
    ),
    Kind(
        name="models",
        singular="model",
        flags=("model_type in config.json of --hf-checkpoint",),
        canonical=("model",),
        calls=(Call(("hf",), "(hf) -> ModelConfig"),),
    ),
    Kind(
        name="megatron_models",
        singular="megatron_model",
        flags=("model_type in config.json of --hf-checkpoint, for --train-backend megatron",),
        canonical=("megatron",),
        calls=(Call(("hf",), "(hf) -> MegatronModel"),),
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
        name="trainers",
        singular="trainer",
        flags=("--train-backend",),
        traits=TrainerTraits,
        canonical=("trainer", "Trainer"),
        methods={
            "train_step": Call(("batch", "micro_batches", "loss_fn"), "(self, batch, micro_batches, loss_fn)"),
            "log_probs": Call(("batch", "micro_batches"), "(self, batch, micro_batches, *, role='actor')"),
            "named_weights": Call((), "(self)"),
        },
        construct=Call(("args",), "(args[, role][, hooks])", keywords=("role", "hooks")),
    ),
    Kind(
        name="weight_transports",
        singular="weight_transport",
        flags=("--update-weight-transport", "--update-weight-mode"),
        canonical=("Transport", "WeightTransport"),
        methods={"send": Call(("weights", "version", "engines"), "(self, weights, version, engines) -> metrics")},
        construct=BUILT_FROM_ARGS,
        traits=TransportTraits,
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
        construct=BUILT_FROM_ARGS,
    ),
)

FUNCTION_FLAGS = (
    FunctionFlag(
        name="reward_post_processes",
        singular="reward_post_process",
        flags=("--custom-reward-post-process-path",),
        canonical=("post_process_rewards", "reward_post_process", "custom_reward_post_process"),
        calls=(Call(("args", "samples"), "(args, samples) -> (raw_rewards, rewards)", plain=True),),
    ),
    FunctionFlag(
        name="sample_converters",
        singular="sample_converter",
        flags=("--custom-convert-samples-to-train-data-path",),
        canonical=("convert_samples_to_train_data", "convert_samples"),
        calls=(Call(("args", "samples"), "(args, samples) -> dict", plain=True),),
    ),
    FunctionFlag(
        name="advantages",
        singular="advantage",
        flags=("--custom-advantage-function-path",),
        canonical=("compute_advantages", "compute_advantages_and_returns", "advantages"),
        calls=(Call(("args", "rollout_data"), "(args, rollout_data) -> None"),),
    ),
    FunctionFlag(
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
    FunctionFlag(
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
)
"""What takes the place of one step of the trainer's side."""
