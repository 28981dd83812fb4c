"""The fields of TRL's `GRPOConfig` (1.16): the setting that each becomes, or the reason why it has none.

`config.py` reads these tables, and `scripts/generate_docs.py` prints them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Field(NamedTuple):
    """A field with a counterpart."""

    default: Any
    """TRL's default."""
    setting: str
    """Setting of slime that gets the value; several if `GRPOConfig.settings` computes them."""


FIELDS: Mapping[str, Field] = {
    "output_dir": Field(None, "save"),
    "learning_rate": Field(1e-6, "lr"),
    "lr_scheduler_type": Field("linear", "lr_decay_style"),
    "warmup_steps": Field(0, "lr_warmup_iters"),
    "warmup_ratio": Field(0.0, "lr_warmup_fraction"),
    "weight_decay": Field(0.0, "weight_decay"),
    "adam_beta1": Field(0.9, "adam_beta1"),
    "adam_beta2": Field(0.999, "adam_beta2"),
    "adam_epsilon": Field(1e-8, "adam_eps"),
    "max_grad_norm": Field(1.0, "clip_grad"),
    "num_train_epochs": Field(3.0, "num_epoch"),
    "max_steps": Field(-1, "num_rollout"),
    "per_device_train_batch_size": Field(8, "global_batch_size"),
    "gradient_accumulation_steps": Field(1, "global_batch_size"),
    "generation_batch_size": Field(None, "rollout_batch_size"),
    "steps_per_generation": Field(None, "num_steps_per_rollout"),
    "num_generations": Field(8, "n_samples_per_prompt"),
    "num_generations_eval": Field(None, "n_samples_per_eval_prompt"),
    "max_completion_length": Field(512, "rollout_max_response_len"),
    "temperature": Field(1.0, "rollout_temperature"),
    "top_p": Field(1.0, "rollout_top_p"),
    "top_k": Field(0, "rollout_top_k"),
    "chat_template_kwargs": Field(None, "apply_chat_template_kwargs"),
    "shuffle_dataset": Field(True, "rollout_shuffle"),
    "beta": Field(0.0, "use_kl_loss, kl_loss_coef"),
    "epsilon": Field(0.2, "eps_clip"),
    "epsilon_high": Field(None, "eps_clip_high"),
    "delta": Field(None, "eps_clip_c"),
    "entropy_coef": Field(0.0, "entropy_coef"),
    "importance_sampling_level": Field("token", "advantage_estimator"),
    "scale_rewards": Field("group", "grpo_std_normalization"),
    "loss_type": Field("dapo", "calculate_per_token_loss, custom_pg_loss_reducer_function_path"),
    "reward_weights": Field(None, "plugins.weighted_sum.terms"),
    "seed": Field(42, "seed, rollout_seed"),
    "bf16": Field(None, "bf16"),
    "gradient_checkpointing": Field(True, "recompute_activations"),
    "save_strategy": Field("steps", "save_interval"),
    "save_steps": Field(500, "save_interval"),
    "eval_strategy": Field("no", "eval_interval"),
    "eval_steps": Field(None, "eval_interval"),
    "report_to": Field("none", "use_wandb, use_tensorboard"),
}
"""Field -> its counterpart."""

IDLE = (
    "logging_steps", "logging_strategy", "logging_first_step", "logging_dir", "log_level", "run_name", "disable_tqdm",
    "log_completions", "num_completions_to_print", "log_unique_prompts", "log_multimodal", "remove_unused_columns",
    "dataloader_num_workers", "dataloader_pin_memory", "save_total_limit", "pad_to_multiple_of", "do_train",
    "per_device_eval_batch_size", "save_only_model", "ds3_gather_for_generation", "cache_implementation",
    "gradient_checkpointing_kwargs", "torch_empty_cache_steps",
)  # fmt: skip
"""Fields that change no result: slime logs every step, keeps every sample, and packs sequences."""

_ENGINE = "generation is the rollout engine's; remove it, or type slime={'rollout_engine': 'sglang'}"
REFUSED: Mapping[str, tuple[Any, str]] = {
    "num_iterations": (1, "a batch is trained on once; type steps_per_generation for more steps a rollout"),
    "use_vllm": (False, _ENGINE),
    "vllm_mode": ("colocate", _ENGINE),
    "vllm_gpu_memory_utilization": (0.3, _ENGINE),
    "vllm_tensor_parallel_size": (1, _ENGINE),
    "vllm_server_host": ("0.0.0.0", _ENGINE),
    "vllm_server_port": (8000, _ENGINE),
    "use_transformers_continuous_batching": (False, _ENGINE),
    "mask_truncated_completions": (False, "type slime={'rollout_sample_filter_path': FILE.py} (docs: hooks)"),
    "repetition_penalty": (1.0, "sampling has no repetition penalty; remove it"),
    "min_p": (None, "sampling has no min_p in training; remove it"),
    "generation_kwargs": (None, "type temperature, top_p or top_k"),
    "sync_ref_model": (False, "type slime={'ref_update_interval': N}"),
    "top_entropy_quantile": (1.0, "type slime={'custom_loss_function_path': FILE.py} (docs: custom-loss)"),
    "use_adaptive_entropy": (False, "type entropy_coef"),
    "fp16": (False, "type bf16=True"),
    "optim": ("adamw_torch_fused", "the optimizer is AdamW; remove it"),
    "push_to_hub": (False, "type save_model(DIR) and upload the directory"),
    "model_init_kwargs": (None, "type slime={'dtype': ...}, or give the model as an object"),
    "deepspeed": (None, "type slime={'train_backend': 'megatron'} for parallel training"),
    "fsdp": (None, "type slime={'train_backend': 'megatron'} for parallel training"),
    "use_liger_kernel": (False, "slime has kernels of its own; remove it"),
    "auto_find_batch_size": (False, "micro-batches are packed by tokens; remove it"),
    "multi_objective_aggregation": ("sum_then_normalize", "weighted rewards are summed, then normalised; remove it"),
}
"""Field -> (the value that means what slime does, what to do instead)."""
