"""Settings without effect: in this version, and with some engines, trainers and weight transports.

A setting in `UNSUPPORTED` is accepted at its default. At any other value, a REFUSED setting ends the command, because
results would silently differ from the request. HINT settings concern only placement, speed, memory or extra output;
they cause one warning.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any

from slime_core.config.schema import Args
from slime_core.config.settings import Origin
from slime_core.config.spec import flag_specs
from slime_core.errors import ConfigError


class Lack(StrEnum):
    """The reaction to a setting that is set but has no effect."""

    REFUSED = "refused"
    HINT = "hint"


_NOWHERE: tuple[tuple[str, Lack, str], ...] = (
    ("fp16", Lack.REFUSED, "there is no loss scaling; set --bf16 or --dtype float32"),
    ("qwen_gdn_backend", Lack.REFUSED, "the model family's plugin brings the layers, with one backend"),
    ("freeze_indexer", Lack.REFUSED, "an indexer of sparse attention trains with the rest"),
    (
        "megatron_deepgemm_forward_layers megatron_deepgemm_forward_modules megatron_deepgemm_moe_forward_layers"
        " megatron_deepgemm_moe_forward_modules",
        Lack.REFUSED,
        "the engine's kernels are not in training",
    ),
    (
        "enable_mtp_training",
        Lack.REFUSED,
        "layers for multi-token prediction are not trained; without it engines draft with the checkpoint's",
    ),
    (
        "rollout_buffer_url load_forge_rollout_data",
        Lack.REFUSED,
        "there is no rollout buffer server; set --data-source-path or --rollout-function-path",
    ),
    ("model_name", Lack.HINT, "the model family follows from config.json"),
    (
        "mtp_num_layers mtp_loss_scaling_factor",
        Lack.HINT,
        "layers for multi-token prediction are not trained; engines draft with the checkpoint's",
    ),
    ("release_train", Lack.HINT, "trainers stay; --offload-train frees their memory"),
    ("use_distributed_post", Lack.HINT, "requests go out from one process"),
    ("rollout_data_transport", Lack.HINT, "samples travel in one way"),
    ("recompute_loss_function", Lack.HINT, "the loss is computed in pieces with --log-probs-chunk-size"),
    ("allgather_cp", Lack.HINT, "sequences are cut over ranks in Megatron's way"),
    ("async_save", Lack.HINT, "a run goes on when its checkpoint is written"),
    ("log_probs_max_tokens_per_gpu", Lack.HINT, "nothing reads it there either"),
    (
        "fetch_trajectory_retry_times min_batch_collection_ratio rollout_task_type",
        Lack.HINT,
        "there is no rollout buffer server",
    ),
    (
        "memory_snapshot_dir memory_snapshot_num_steps memory_recorder record_memory_history profile_target",
        Lack.HINT,
        "--profile says where the time went, of a whole run",
    ),
    (
        "ci_test ci_disable_kl_checker ci_train_rollout_logprob_abs_diff_threshold ci_save_grad_norm ci_load_grad_norm",
        Lack.HINT,
        "it is for THUDM/slime's own tests",
    ),
)
"""Rows of settings (separated by spaces), the reaction when one is set, and the reason. Adding a feature removes its
row."""

_OF_TRAINERS = (
    (
        "custom_megatron_before_log_prob_hook_path custom_megatron_before_train_step_hook_path"
        " custom_megatron_init_path custom_model_provider_path keep_old_actor lora_alpha lora_dropout lora_rank"
        " lora_target_modules lora_unmerged padded_vocab_size",
        Lack.REFUSED,
    ),
    ("data_pad_size_multiplier offload_train", Lack.HINT),
)
_OF_OTHERS = (
    ("prefill_num_servers rollout_external_engine_addrs sglang_config", Lack.REFUSED),
    (
        "actor_num_gpus_per_node actor_num_nodes colocate engine_router engine_start_timeout kernels model_impl"
        " num_gpus_per_node offload_rollout rollout_health_check_first_wait rollout_health_check_interval"
        " rollout_health_check_timeout rollout_max_engine_restarts rollout_num_gpus rollout_num_gpus_per_engine"
        " sglang_router_request_timeout_secs update_weight_delta_checksum update_weight_delta_encoding"
        " update_weight_local_checkpoint_dir update_weight_pause_mode update_weight_puller_addrs update_weight_timeout"
        " use_fault_tolerance",
        Lack.HINT,
    ),
)


def _by_name(table: Sequence[tuple[Any, ...]], column: int) -> dict[str, Any]:
    return {name: row[column] for row in table for name in row[0].split()}


UNSUPPORTED: Mapping[str, Lack] = _by_name(_NOWHERE, 1)
"""Setting -> reaction when it is set."""
WHY: Mapping[str, str] = _by_name(_NOWHERE, 2)
"""Setting of `UNSUPPORTED` -> reason."""
OF_TRAINERS: Mapping[str, Lack] = _by_name(_OF_TRAINERS, 1)
"""Settings of `BY_COMPONENT` that concern only training; a command without a trainer does not check them."""
BY_COMPONENT: Mapping[str, Lack] = {**OF_TRAINERS, **_by_name(_OF_OTHERS, 1)}
"""Setting that only some engines, trainers and weight transports use -> reaction with the others. A component that
uses a setting lists it in its class attribute `uses`. The launcher checks the settings once it knows the components."""

REFUSED_VALUES: Mapping[str, tuple[object, ...]] = {
    "optimizer": ("sgd",),
    "recompute_granularity": ("selective",),
}
"""Values that work only with components whose `uses` lists the setting; other values of these settings always work."""


def check_support(args: Args, origins: Mapping[str, Origin]) -> list[str]:
    """Return warnings for hints that are set. Raises ConfigError that lists all refused settings."""
    refused, hints = _set_and_lacking(UNSUPPORTED, {}, args, origins)
    if refused:
        told = [
            f"{text} is not supported by this version: {WHY[name]}; remove to go on." for name, text in refused.items()
        ]
        raise ConfigError("\n".join(told))
    return [f"without effect in this version: {', '.join(hints)}"] if hints else []


def check_component_support(args: Args, origins: Mapping[str, Origin], uses: Collection[str], chosen: str) -> list[str]:
    """Do as `check_support` for the settings in `BY_COMPONENT` and the values in `REFUSED_VALUES`.

    Args:
        args: The run's settings.
        origins: Origin of each setting.
        uses: Settings that the run's components declare in `uses`.
        chosen: Name of these components in messages.

    Raises:
        ConfigError: A setting that the results depend on is set, and no component uses it.
    """
    unused = {name: lack for name, lack in BY_COMPONENT.items() if name not in uses}
    values = {name: refused for name, refused in REFUSED_VALUES.items() if name not in uses}
    refused, hints = _set_and_lacking(unused, values, args, origins)
    if refused:
        verb = "has" if len(refused) == 1 else "have"
        raise ConfigError(
            f"{', '.join(refused.values())} {verb} no effect with {chosen}; remove to go on, or choose others."
        )
    return [f"without effect with {chosen}: {', '.join(hints)}"] if hints else []


def _set_and_lacking(
    lacking: Mapping[str, Lack],
    values: Mapping[str, tuple[object, ...]],
    args: Args,
    origins: Mapping[str, Origin],
) -> tuple[dict[str, str], list[str]]:
    """Return the settings that are not at their defaults, as text for messages: refused ones by name, and hints."""
    refused, hints = dict[str, str](), list[str]()
    for name, spec in flag_specs().items():
        value, lack = getattr(args, name), lacking.get(name)
        if value in values.get(name, ()):
            lack = Lack.REFUSED
        # A derived value was not set by the user.
        elif value == spec.default or origins[name].kind == "derived":
            continue
        text = f"{spec.show(value)} ({origins[name]})"
        if lack is Lack.REFUSED:
            refused[name] = text
        elif lack is Lack.HINT:
            hints.append(text)
    return refused, hints
