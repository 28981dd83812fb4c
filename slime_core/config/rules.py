"""What follows from the settings, and what they may not say together: small functions in one order.

A rule reads `s.args`, fills in with `s.derive`, warns with `s.warnings.append`, and raises ConfigError naming the
values involved with their origins. Derivations never replace a value that somebody gave. Requirements of plugins
(an estimator that needs `--normalize-advantages`, say) are checked where the plugin is loaded.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable

from slime_core.config.async_rules import asynchrony, group_deadline
from slime_core.config.debug_rules import dumps, half_a_loop
from slime_core.config.eval_config import resolve_eval_datasets
from slime_core.config.length_rules import context_lengths, context_of_model, response_is_bounded
from slime_core.config.objective_rules import (
    clipping,
    distillation,
    group_statistics,
    kl_to_reference,
    off_policy,
    routing_replay,
)
from slime_core.config.schema import Given
from slime_core.config.settings import Settings
from slime_core.config.spec import flag_specs
from slime_core.errors import ConfigError

_OPTIMIZES = ("train", "sft")
_SCORES = ("train", "eval", "rollout")


# -- model, device, directories --------------------------------------------------------------------------


def model_is_named(s: Settings) -> None:
    """Every command but `show` needs a checkpoint."""
    if s.command != "show" and not s.args.hf_checkpoint:
        where = "scripts/models/*.sh take it from HF_CHECKPOINT"
        raise ConfigError(f"--hf-checkpoint is required: a directory in Hugging Face layout ({where}).")


def dtype_flags(s: Settings) -> None:
    """`--bf16` is `--dtype bfloat16`."""
    if s.args.bf16 and s.args.dtype == "float32":
        raise ConfigError(f"{s.cite('bf16')} contradicts {s.cite('dtype')}; remove one.")
    if s.args.bf16 and not s.is_given("dtype"):
        s.derive("dtype", "bfloat16", "bf16")


def true_on_policy(s: Settings) -> None:
    """Bitwise equal log-probs need float32, and tokens that all come from the weights about to be trained."""
    a = s.args
    if not a.true_on_policy_mode:
        return
    if a.dtype == "bfloat16":
        raise ConfigError(f"{s.cite('true_on_policy_mode')} needs float32: remove {s.cite('dtype')}.")
    if a.dtype == "auto":
        s.derive("dtype", "float32", "true_on_policy_mode")
    for name in ("partial_rollout", "use_tis"):
        if getattr(a, name):
            raise ConfigError(
                f"{s.cite('true_on_policy_mode')} and {s.cite(name)} exclude each other: one says that all tokens"
                " come from the weights being trained, the other that some do not."
            )


def run_directory(s: Settings) -> None:
    """Metrics and summary go beside the checkpoints."""
    if s.args.run_dir is None and s.args.save is not None:
        s.derive("run_dir", s.args.save, "save")
    elif s.args.run_dir is None and s.command not in ("show", "serve"):
        s.derive("run_dir", os.path.join("outputs", s.command), f"slime {s.command}")


# -- data, batches, length of the run --------------------------------------------------------------------


def sft_defaults(s: Settings) -> None:
    """Supervised fine-tuning: one sample per prompt, no advantages."""
    if s.command != "sft":
        return
    if s.args.n_samples_per_prompt != 1:
        raise ConfigError(f"{s.cite('n_samples_per_prompt')}: supervised fine-tuning takes one sample per prompt.")
    if s.args.eval_interval is not None and not s.args.eval_function_path:
        raise ConfigError(f"{s.cite('eval_interval')}: slime sft runs no engine; use slime eval on its checkpoints.")
    if not s.is_given("rollout_function_path"):
        s.derive("rollout_function_path", "sft", "slime sft")
    if not s.is_given("loss_type"):
        s.derive("loss_type", "sft_loss", "slime sft")
    if not s.is_given("compute_advantages_and_returns"):
        s.derive("compute_advantages_and_returns", False, "slime sft")
    a: Given = s.args
    if a.rollout_batch_size is None and a.global_batch_size is not None:
        s.derive("rollout_batch_size", a.global_batch_size, "global_batch_size")


def data_is_named(s: Settings) -> None:
    """Training and rollouts need prompts, unless the user's code brings them."""
    a = s.args
    brings_own = a.data_source_path or a.rollout_function_path or not a.rollout_global_dataset or a.debug_train_only
    if s.command in ("train", "sft", "rollout") and not a.prompt_data and not brings_own:
        raise ConfigError("--prompt-data is required: a JSONL or parquet file.")
    if a.streaming_data and a.rollout_shuffle:
        s.warnings.append(
            f"{s.cite('streaming_data')} has no effect with {s.cite('rollout_shuffle')}, which orders all rows."
        )
        s.derive("streaming_data", False, "rollout_shuffle")


def batch_sizes(s: Settings) -> None:
    """rollout_batch_size * n_samples_per_prompt = global_batch_size * num_steps_per_rollout."""
    a: Given = s.args
    if a.rollout_batch_size is None:
        if s.command in ("train", "sft", "rollout"):
            raise ConfigError("--rollout-batch-size is required: the number of prompts per rollout.")
        return
    samples = a.rollout_batch_size * a.n_samples_per_prompt
    product = f"{s.cite('rollout_batch_size')} * {s.cite('n_samples_per_prompt')} = {samples} samples per rollout"
    steps, per_step = a.num_steps_per_rollout, a.global_batch_size
    if steps is not None and per_step is not None and samples != steps * per_step:
        raise ConfigError(
            f"{product}, but {s.cite('global_batch_size')} * {s.cite('num_steps_per_rollout')} = {steps * per_step};"
            " drop one of the last two, or make the products equal."
        )
    if steps is not None and samples % steps:
        raise ConfigError(f"{product} cannot be divided into {s.cite('num_steps_per_rollout')}.")
    if per_step is not None and samples % per_step:
        raise ConfigError(f"{product} cannot be divided by {s.cite('global_batch_size')}; the rest would be lost.")
    if per_step is None:
        per_step = samples // (steps or 1)
        why = "rollout_batch_size * n_samples_per_prompt" + (" / num_steps_per_rollout" if steps else "")
        s.derive("global_batch_size", per_step, why)
    if steps is None:
        why = "rollout_batch_size * n_samples_per_prompt / global_batch_size"
        s.derive("num_steps_per_rollout", samples // per_step, why)


def over_sampling(s: Settings) -> None:
    """At least one rollout's prompts are started at a time."""
    a: Given = s.args
    if a.over_sampling_batch_size is None:
        if a.rollout_batch_size is not None:
            s.derive("over_sampling_batch_size", a.rollout_batch_size, "rollout_batch_size")
    elif a.rollout_batch_size is not None and a.over_sampling_batch_size < a.rollout_batch_size:
        raise ConfigError(f"{s.cite('over_sampling_batch_size')} must be at least {s.cite('rollout_batch_size')}.")


def exhausted_budget(s: Settings) -> None:
    """A smaller rollout is made of whole optimizer steps."""
    a = s.args
    if a.dynamic_sampling_on_exhausted != "shrink" or a.rollout_batch_size is None:
        return
    per_step = a.global_batch_size or 0  # `batch_sizes` has filled it in
    if a.num_steps_per_rollout == 1 or per_step % a.n_samples_per_prompt:
        raise ConfigError(
            f"{s.cite('dynamic_sampling_on_exhausted')} trains on fewer optimizer steps of whole groups, so it needs"
            f" several steps per rollout and {s.cite('global_batch_size')} a multiple of"
            f" {s.cite('n_samples_per_prompt')}; set --num-steps-per-rollout, or choose stop or keep."
        )


def micro_batches(s: Settings) -> None:
    """Packing by tokens needs the number of tokens."""
    a = s.args
    if a.use_dynamic_batch_size and a.max_tokens_per_gpu is None:
        raise ConfigError(f"{s.cite('use_dynamic_batch_size')} needs --max-tokens-per-gpu N.")
    if not a.use_dynamic_batch_size:
        for name in ("max_tokens_per_gpu", "balance_by_flops"):
            if s.is_given(name) and getattr(a, name):
                raise ConfigError(f"{s.cite(name)} needs --use-dynamic-batch-size.")
    elif s.is_given("micro_batch_size"):
        s.warnings.append(f"{s.cite('micro_batch_size')} has no effect with {s.cite('use_dynamic_batch_size')}.")


def length_of_run(s: Settings) -> None:
    """`--num-rollout` wins over `--num-epoch`; training needs one of them."""
    a: Given = s.args
    if a.num_rollout is not None and a.num_epoch is not None:
        s.warnings.append(f"{s.cite('num_epoch')} has no effect with {s.cite('num_rollout')}.")
    elif a.num_epoch is not None and not (a.rollout_global_dataset and (a.prompt_data or a.data_source_path)):
        raise ConfigError(f"{s.cite('num_epoch')} needs --prompt-data; without it give --num-rollout N.")
    elif a.num_rollout is None and a.num_epoch is None:
        if s.command in _OPTIMIZES:
            raise ConfigError("--num-rollout N or --num-epoch N is required.")
        if s.command == "rollout":
            s.derive("num_rollout", 1, "slime rollout")


def trained_parameters(s: Settings) -> None:
    """Parameters are named by what trains or by what does not."""
    if s.args.only_train_params_name_list and s.args.freeze_params_name_list:
        names = s.cite("only_train_params_name_list"), s.cite("freeze_params_name_list")
        raise ConfigError(f"{names[0]} and {names[1]} are both set; use one.")


def adapters(s: Settings) -> None:
    """LoRA is asked for by its rank, and has no dropout."""
    a = s.args
    others = ("lora_alpha", "lora_dropout", "lora_target_modules")
    changed = [s.cite(name) for name in others if getattr(a, name) != flag_specs()[name].default]
    if changed and a.lora_rank is None:
        raise ConfigError(f"{', '.join(changed)}: without --lora-rank N there are no adapters.")
    if a.lora_dropout:
        raise ConfigError(f"{s.cite('lora_dropout')}: log-probs of two passes over a sample must be equal; only 0.")


def schedule(s: Settings) -> None:
    """One way to give the warm-up, a floor below the peak, and a decay where something is said of one."""
    a = s.args
    if a.lr_warmup_fraction is not None and a.lr_warmup_iters:
        raise ConfigError(f"{s.cite('lr_warmup_iters')} and {s.cite('lr_warmup_fraction')} are both set; use one.")
    if a.min_lr > a.lr:
        raise ConfigError(f"{s.cite('min_lr')} must not exceed {s.cite('lr')}.")
    if a.lr_decay_style == "constant":
        for name in ("min_lr", *([] if a.lr_warmup_fraction else ["lr_decay_iters"])):
            if s.is_given(name) and getattr(a, name):
                s.warnings.append(f"{s.cite(name)} has no effect with {s.cite('lr_decay_style')}: nothing decays.")


# -- reward and evaluation ----------------------------------------------------------------------------------


def reward_is_named(s: Settings) -> None:
    """Something must score, unless the user's own generation does."""
    a = s.args
    if a.rm_type and a.custom_rm_path and s.origins["rm_type"].kind == s.origins["custom_rm_path"].kind:
        s.warnings.append(f"{s.cite('rm_type')} has no effect with {s.cite('custom_rm_path')}.")
    scores_itself = a.custom_generate_function_path or a.rollout_function_path or a.eval_function_path
    if s.command not in _SCORES or a.rm_type or a.custom_rm_path or scores_itself or a.debug_train_only:
        return
    if s.command == "eval" and all(d.rm_type or d.custom_rm_path for d in s.args.eval_datasets):
        return
    raise ConfigError("no reward: give --rm-type NAME or --custom-rm-path PATH; `slime plugins list` shows the names.")


def inherited_names(s: Settings) -> None:
    """Evaluation uses what training uses unless told otherwise."""
    a = s.args
    if a.eval_reward_key is None and a.reward_key is not None:
        s.derive("eval_reward_key", a.reward_key, "reward_key")
    if a.eval_function_path is None and s.is_given("rollout_function_path"):
        s.derive("eval_function_path", a.rollout_function_path, "rollout_function_path")
    if a.mask_offpolicy_in_partial_rollout and not a.partial_rollout:
        raise ConfigError(f"{s.cite('mask_offpolicy_in_partial_rollout')} needs --partial-rollout.")


def evaluation(s: Settings) -> None:
    """`args.eval_datasets`, and something to evaluate when asked to."""
    a = s.args
    if a.eval_config and a.eval_prompt_data:
        raise ConfigError(f"{s.cite('eval_config')} and {s.cite('eval_prompt_data')} are both set; use one.")
    if a.resume is not None and s.command not in ("eval", "show"):
        raise ConfigError(f"{s.cite('resume')} is for slime eval; slime {s.command} goes on with --load RUN.")
    if s.is_absent("eval_config"):
        return
    source = "eval_config" if a.eval_config else "eval_prompt_data"
    datasets, warnings = resolve_eval_datasets(a, str(s.origins[source]))
    a.eval_datasets = datasets
    s.warnings += warnings
    if datasets or a.eval_function_path:
        return
    if a.eval_interval is not None:
        s.warnings.append(
            f"{s.cite('eval_interval')}: no data: give --eval-prompt-data NAME PATH or --eval-config FILE."
        )
        s.derive("eval_interval", None, "no evaluation data")
    if s.command == "eval":
        raise ConfigError("nothing to evaluate: give --eval-prompt-data NAME PATH or --eval-config FILE.")


def placement(s: Settings) -> None:
    """A command that trains nothing leaves every GPU to inference."""
    if s.command in ("eval", "rollout"):
        s.derive("actor_num_gpus_per_node", 0, f"slime {s.command}")


# -- weights ----------------------------------------------------------------------------------


_BY_FILES = ("auto", "nccl", "disk")
"""Transports that `--update-weight-mode delta` may stand beside: files, or nothing that says otherwise."""


def weight_transport(s: Settings) -> None:
    """`--update-weight-mode` other than full is the transport of that name."""
    mode, transport = s.args.update_weight_mode, s.args.update_weight_transport
    if mode == "full":
        return
    if transport not in (*_BY_FILES, mode):
        raise ConfigError(
            f"{s.cite('update_weight_mode')} goes by files, not by {s.cite('update_weight_transport')}; remove that, or"
            " type --update-weight-transport disk."
        )
    s.derive("update_weight_transport", mode, "update_weight_mode")


def offloading(s: Settings) -> None:
    """What gives its memory up while the other side works: with `--offload` and `--colocate` both, unless told."""
    a = s.args
    idle = None
    if s.command in ("eval", "rollout") or a.debug_rollout_only:
        idle = "nothing is trained"
    elif a.debug_train_only:
        idle = "nothing is generated"
    cause = "offload" if a.offload else "colocate" if a.colocate else None
    if idle is not None and a.offload and s.is_given("offload"):
        s.warnings.append(f"{s.cite('offload')} has no effect: {idle}.")
    for name in ("offload_train", "offload_rollout"):
        if idle is not None and getattr(a, name):
            s.warnings.append(f"{s.cite(name)} has no effect: {idle}.")
        if idle is not None or not s.is_given(name):
            s.derive(name, idle is None and cause is not None, cause or "colocate")


Rule = Callable[[Settings], None]

RULES: tuple[Rule, ...] = (
    model_is_named,
    dtype_flags,
    true_on_policy,
    run_directory,
    half_a_loop,
    dumps,
    sft_defaults,
    data_is_named,
    batch_sizes,
    over_sampling,
    exhausted_budget,
    group_deadline,
    micro_batches,
    length_of_run,
    schedule,
    trained_parameters,
    adapters,
    context_of_model,
    context_lengths,
    inherited_names,
    evaluation,
    response_is_bounded,
    reward_is_named,
    clipping,
    off_policy,
    routing_replay,
    group_statistics,
    kl_to_reference,
    distillation,
    weight_transport,
    placement,
    asynchrony,
    offloading,
)
"""In this order: later ones read what earlier ones derived."""


def apply_rules(settings: Settings) -> None:
    """Run every rule. Raises ConfigError at the first broken one."""
    for rule in RULES:
        rule(settings)
