"""The kinds of component that a run is made of, and the flags that take a function, one row each."""

from __future__ import annotations

from slime_core.plugins.kind import BUILT_BY_NAME, BUILT_FROM_ARGS, Call, FunctionFlag, Kind
from slime_core.protocols import (
    EditTraits,
    EngineTraits,
    GenerateTraits,
    RewardTraits,
    RolloutTraits,
    TrainerTraits,
    TransportTraits,
)

_SINGLE_REWARD = Call("(args, sample[, evaluation], **kwargs) -> float")
_BATCH_REWARD = Call("(args, samples[, evaluation], **kwargs) -> list[float]", marker="samples")

COMPONENTS = (
    # -- what makes, scores, chooses and reports samples, and what commands begin with
    Kind(
        name="rewards",
        flags=("--rm-type", "--custom-rm-path"),
        canonical=("reward", "reward_func", "compute_score", "custom_rm", "batched_custom_rm"),
        calls=(_BATCH_REWARD, _SINGLE_REWARD),
        methods={"compute_reward": Call("(self, prompts, responses[, evaluation]) -> list[float]")},
        construct=BUILT_BY_NAME,
        traits=RewardTraits,
        prefixes={"boxed_": "slime_core.plugins.boxed:boxed"},
    ),
    Kind(
        name="generators",
        flags=("--custom-generate-function-path",),
        traits=GenerateTraits,
        canonical=("generate",),
        calls=(
            Call(
                "async (args, sample, sampling_params[, evaluation][, context]) -> Sample | list[Sample]", awaited=True
            ),
            Call(
                "async (args, samples[, sampling_params][, evaluation][, context]) -> list[Sample]",
                marker="samples",
                awaited=True,
            ),
        ),
    ),
    Kind(
        name="tools",
        flags=("--tools-path",),
        canonical=("tools", "tool"),
        lists=True,
    ),
    Kind(
        name="tool_parsers",
        flags=("--tool-call-parser",),
        canonical=("ToolParser", "tool_parser"),
        methods={
            "parse": Call("(self, text, tools, *, reasoning_open=False) -> ParsedTurn"),
            "render": Call("(self, calls) -> str"),
            "claims": Call("(self, chat_template) -> bool"),
        },
        construct=Call("()"),
    ),
    Kind(
        name="environments",
        flags=("--environment-path",),
        canonical=("Environment", "environment"),
        methods={
            "reset": Call("(self, sample) -> text, chat messages or None"),
            "step": Call("(self, action[, turn]) -> slime_core.Step"),
            "close": Call("(self) -> None"),
        },
        construct=BUILT_BY_NAME,
    ),
    Kind(
        name="buffers",
        traits=EditTraits,
        flags=("--buffer-filter-path",),
        canonical=("buffer_filter", "Buffer"),
        calls=(
            Call("(args, rollout_id, buffer, num_samples) -> list[Group]"),
            Call("(args, buffer, num_samples) -> list[Sample]"),
        ),
        methods={
            "begin_rollout": Call("(self, rollout_id, weight_version) -> None"),
            "add": Call("(self, groups) -> None"),
            "take": Call("(self, num_groups) -> list[Group]"),
            "wants": Call("(self, prompt) -> bool"),
            "observe": Call("(self, groups, trained) -> None"),
            "take_metrics": Call("(self) -> dict[str, float]"),
            "state_dict": Call("(self) -> dict"),
            "load_state_dict": Call("(self, state) -> None"),
        },
        construct=BUILT_BY_NAME,
    ),
    Kind(
        name="filters",
        traits=EditTraits,
        flags=("--dynamic-sampling-filter-path",),
        canonical=("dynamic_filter", "dynamic_sampling_filter", "filter"),
        calls=(Call("(args, samples, **kwargs) -> FilterDecision | bool", plain=True),),
    ),
    Kind(
        name="data_sources",
        flags=("--data-source-path",),
        canonical=("data_source", "DataSource"),
        methods={
            "get_samples": Call("(self, num_samples) -> list[Group]"),
            "add_samples": Call("(self, samples) -> None"),
        },
        construct=BUILT_BY_NAME,
    ),
    Kind(
        name="rollouts",
        flags=("--rollout-function-path", "--eval-function-path"),
        traits=RolloutTraits,
        canonical=("generate_rollout", "rollout"),
        calls=(
            Call(
                "(args, rollout_id, data_source[, evaluation][, context]) -> RolloutFnTrainOutput | RolloutFnEvalOutput"
            ),
        ),
    ),
    Kind(
        name="engines",
        flags=("--rollout-engine",),
        traits=EngineTraits,
        canonical=("engine", "Engine"),
        methods={
            "generate": Call("async (self, input_ids, sampling_params, *, rid=None)"),
            "start": Call("async (self)"),
            "stop": Call("async (self)"),
        },
        construct=BUILT_FROM_ARGS,
    ),
    Kind(
        name="recipes",
        flags=("--prepare-path",),
        canonical=("prepare", "recipe"),
        calls=(Call("(args) -> None"),),
    ),
    # -- what becomes of samples in the trainer
    Kind(
        name="estimators",
        flags=("--advantage-estimator",),
        canonical=("estimator", "compute_advantages"),
        calls=(Call("(args, rollout_data) -> None"),),
        methods={
            "shape_rewards": Call("(self, args, inputs) -> list[float]"),
            "advantages": Call("(self, args, inputs) -> Advantages"),
            "policy_loss": Call("(self, args, inputs) -> LossOutputs"),
        },
        construct=BUILT_FROM_ARGS,
    ),
    Kind(
        name="models",
        flags=("model_type in config.json of --hf-checkpoint",),
        canonical=("model",),
        calls=(Call("(hf) -> ModelConfig"),),
    ),
    Kind(
        name="megatron_models",
        flags=("model_type in config.json of --hf-checkpoint, for --train-backend megatron",),
        canonical=("megatron",),
        calls=(Call("(hf) -> MegatronModel"),),
    ),
    Kind(
        name="losses",
        flags=("--loss-type",),
        canonical=("loss", "Loss"),
        methods={"bind": Call("(self, batch, tensors, denominators) -> LossFn")},
        construct=Call("(args, estimator)"),
    ),
    Kind(
        name="trainers",
        flags=("--train-backend",),
        traits=TrainerTraits,
        canonical=("trainer", "Trainer"),
        methods={
            "train_step": Call("(self, batch, micro_batches, loss_fn)"),
            "log_probs": Call("(self, batch, micro_batches, *, role='actor')"),
            "named_weights": Call("(self)"),
        },
        construct=Call("(args[, role][, hooks])"),
    ),
    Kind(
        name="weight_transports",
        flags=("--update-weight-transport", "--update-weight-mode"),
        canonical=("Transport", "WeightTransport"),
        methods={"send": Call("(self, weights, version, engines) -> metrics")},
        construct=BUILT_FROM_ARGS,
        traits=TransportTraits,
    ),
    Kind(
        name="corrections",
        flags=("--custom-tis-function-path",),
        canonical=("correction", "tis_function", "custom_tis_function", "compute_mis_weights_with_cp"),
        calls=(
            Call(
                "(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths)"
                " -> (pg_loss, loss_masks, metrics)"
            ),
        ),
        methods={"weigh": Call("(self, inputs) -> CorrectionOutputs")},
        construct=BUILT_FROM_ARGS,
    ),
)

FUNCTION_FLAGS = (
    FunctionFlag(
        name="reward_post_processes",
        flags=("--custom-reward-post-process-path",),
        canonical=("post_process_rewards", "reward_post_process", "custom_reward_post_process"),
        calls=(Call("(args, samples) -> (raw_rewards, rewards)", plain=True),),
    ),
    FunctionFlag(
        name="sample_converters",
        flags=("--custom-convert-samples-to-train-data-path",),
        canonical=("convert_samples_to_train_data", "convert_samples"),
        calls=(Call("(args, samples) -> dict", plain=True),),
    ),
    FunctionFlag(
        name="advantages",
        flags=("--custom-advantage-function-path",),
        canonical=("compute_advantages", "compute_advantages_and_returns", "advantages"),
        calls=(Call("(args, rollout_data) -> None"),),
    ),
    FunctionFlag(
        name="loss_reducers",
        flags=("--custom-pg-loss-reducer-function-path",),
        canonical=("reducer", "get_pg_loss_reducer", "pg_loss_reducer"),
        calls=(
            Call(
                "(total_lengths, response_lengths, loss_masks, calculate_per_token_loss[, args]) -> (tensor) -> scalar"
            ),
        ),
    ),
    FunctionFlag(
        name="custom_losses",
        flags=("--custom-loss-function-path",),
        canonical=("custom_loss", "loss_function", "loss"),
        calls=(Call("(args, batch, logits, sum_of_sample_mean) -> (loss, dict of metrics)", plain=True),),
    ),
)
"""Kinds of function that replace one step on the trainer's side."""
