"""Rows of the table of kinds: what becomes of samples in the trainer."""

from __future__ import annotations

from slime_core.plugins.kind import BUILT_FROM_ARGS, Call, Kind
from slime_core.protocols import TrainerTraits, TransportTraits

TRAINING = (
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
        name="megatron_model_providers",
        singular="megatron_model_provider",
        flags=("--custom-model-provider-path",),
        canonical=("model_provider", "custom_model_provider"),
        calls=(
            Call(
                (),
                "(pre_process, post_process[, vp_stage]) -> GPTModel",
                keywords=("vp_stage",),
                named=("pre_process", "post_process"),
                plain=True,
            ),
        ),
    ),
)
