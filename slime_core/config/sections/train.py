"""Settings of the optimizer, of memory against speed, of weight hand-over and of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from slime_core.config.sections.base import Decay, Exclusive, File, NoEffect, Refused, Rule, Section
from slime_core.errors import ConfigError

if TYPE_CHECKING:
    from slime_core.config.settings import Settings


NamePatterns = Annotated[list[str] | None, Field(min_length=1)]


class OptimizerArgs(Section):
    """Optimizer."""

    lr: NonNegativeFloat = 1e-6
    """Learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """Shape of the decay from --lr to --min-lr; constant: none, so a run can go on for longer."""
    lr_decay_iters: PositiveInt | None = None
    """Optimizer steps of the decay; all steps of the run when not given."""
    lr_warmup_iters: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    lr_warmup_fraction: Annotated[float | None, Field(ge=0, le=1)] = None
    """Warm-up as a part of --lr-decay-iters."""
    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate at the start of the warm-up."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the last part of the WSD schedule."""
    lr_wsd_decay_iters: PositiveInt | None = None
    """Optimizer steps of the last part of the WSD schedule."""
    override_opt_param_scheduler: bool = False
    """On --load, take this run's schedule where the checkpoint's differs."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    adam_beta1: Decay = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: Decay = 0.999
    """Decay of Adam's second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the root of Adam's second moment."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    reset_optimizer_states: bool = False
    """Forget the moments at the start of each rollout."""
    use_stateless_adam: bool = False
    """Adam without moments."""
    only_train_params_name_list: NamePatterns = None
    """Regular expressions; only parameters whose name matches one are trained."""
    freeze_params_name_list: NamePatterns = None
    """Regular expressions; parameters whose name matches one are not trained."""
    freeze_indexer: bool = False
    """Do not train the indexer of sparse attention."""


class LoraArgs(Section):
    """LoRA."""

    lora_rank: PositiveInt | None = None
    """Train adapters of this rank beside the actor's frozen matrices; all of its weights when not given."""
    lora_alpha: PositiveFloat | None = None
    """Adapters count alpha / rank times; the rank, hence once, when not given."""
    lora_dropout: Decay = 0.0
    """Only 0: passes over one sample must agree. For launch scripts that set it."""
    lora_target_modules: Annotated[list[str], Field(min_length=1)] = ["all-linear"]
    """Modules with adapters, by the last part of their HF name (q_proj v_proj); all-linear: all but routed experts."""
    lora_adapters: list[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]] = []
    """Names of further adapters, each generated and trained with samples whose train_metadata names it."""
    lora_unmerged: bool = False
    """Send engines the adapters alone, which they add to the model of --hf-checkpoint, instead of merged weights."""


class TrainArgs(Section):
    """Trainer."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass instead of keeping them."""
    recompute_activations: bool = False
    """The same in the way that each trainer can: selective with Megatron, whole layers with the embedded trainer."""
    recompute_loss_function: bool = False
    """Recompute the loss in the backward pass instead of keeping its activations."""
    log_probs_chunk_size: Annotated[int, Field(ge=-1)] = -1
    """Rows of logits held at a time for log-probs and entropy; -1 lets the trainer choose."""
    qwen_gdn_backend: Literal["fla", "flashqla"] = "fla"
    """Kernels of gated delta nets."""
    allgather_cp: bool = False
    """Contiguous layout for context parallelism."""
    megatron_config_path: File = None
    """YAML file with settings per role."""
    custom_megatron_init_path: str | None = None
    """fn(args) called once the trainer is initialised."""
    custom_megatron_before_log_prob_hook_path: str | None = None
    """fn(args, model, store_prefix) called before a log-prob pass."""
    custom_megatron_before_train_step_hook_path: str | None = None
    """fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler) called before a step."""
    megatron_deepgemm_forward_layers: list[int] | None = None
    """Layers that use the engine's matrix kernels in the forward pass."""
    megatron_deepgemm_forward_modules: list[str] | None = None
    """Modules that use the engine's matrix kernels in the forward pass."""
    megatron_deepgemm_moe_forward_layers: list[int] | None = None
    """MoE layers that use the engine's matrix kernels in the forward pass."""
    megatron_deepgemm_moe_forward_modules: list[str] | None = None
    """MoE modules that use the engine's matrix kernels in the forward pass."""
    mtp_num_layers: PositiveInt | None = None
    """Layers for multi-token prediction."""
    mtp_loss_scaling_factor: NonNegativeFloat = 0.2
    """Weight of the multi-token prediction loss."""
    enable_mtp_training: bool = False
    """Train the multi-token prediction layers."""


class WeightArgs(Section):
    """Weight hand-over."""

    update_weight_mode: Literal["full", "delta"] = "full"
    """Send all weights or what changed."""
    update_weight_transport: str = "auto"
    """How weights reach the engine: tensor (memory), distributed (broadcast), disk (files), delta (what changed) or
    another plugin; auto is the engine's best, nccl tensor or distributed."""
    update_weight_buffer_size: PositiveInt = 512 * 1024**2
    """Bytes of weights sent to servers at a time."""
    update_weight_timeout: PositiveFloat = 600.0
    """Seconds a server has for one step of a weight update, such as a bucket."""
    update_weight_pause_mode: Literal["abort", "in_place", "retract"] | None = None
    """Requests in flight end, go on with the old cache, or are read again; by default the last, where SGLang can, and
    the second on the embedded engine."""
    update_weights_interval: PositiveInt = 1
    """Rollouts between weight updates with --async; without it every rollout has the newest weights."""
    update_weight_disk_dir: File = None
    """Directory for transports that write files (disk, delta), seen by trainer and engines."""
    update_weight_disk_keep_files: bool = False
    """Keep the files of past weight versions."""
    update_weight_delta_encoding: Literal["xor", "overwrite"] = "xor"
    """How a delta is written."""
    update_weight_delta_checksum: Literal["xxh3-128", "blake3", "adler32"] = "xxh3-128"
    """Checksum of a delta."""
    update_weight_local_checkpoint_dir: File = None
    """Directory on the engine's host that deltas are applied to; local_weights in the run directory when not given."""
    update_weight_puller_addrs: list[str] | None = None
    """HOST:PORT of each `slime pull-weights` beside engines that are already running."""
    update_weight_start_version: NonNegativeInt = 0
    """Weight version before the first update."""
    custom_update_weight_post_write_path: str | None = None
    """fn(args, version_dir, rollout_engines) called once weights are on disk."""
    check_weight_update_equal: bool = False
    """Compare the engine's weights with the trainer's after every update."""


class CheckpointArgs(Section):
    """Checkpoint."""

    save: File = None
    """Directory for checkpoints; the run directory when not given."""
    load: File = None
    """Directory of checkpoints to go on from."""
    initial_megatron_checkpoint: File = None
    """Weights to start from where --load has no checkpoint: Megatron's format or Hugging Face's; the tokenizer and the
    configuration are those of --hf-checkpoint."""
    save_interval: PositiveInt | None = None
    """Rollouts between checkpoints; when not given, one every --save-minutes. Also after the last rollout, and where a
    signal ends the run."""
    save_minutes: PositiveFloat = 10.0
    """Longest time between checkpoints where --save-interval is not given, if no rollout takes longer."""
    drain_timeout: PositiveFloat = 300.0
    """Seconds from SIGTERM or ctrl-C to the end of the run; until then it finishes its training step and commits."""
    max_trainer_restarts: NonNegativeInt = 0
    """Largest number of restarts of trainer ranks that died, from the last commit (see --save-interval and
    --save-minutes), with the engines as they are; for --launcher ray. 0: the run ends, and --load resumes it."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights in checkpoints; float32 resumes bit for bit."""
    save_shard_size: PositiveFloat = 5.0
    """Largest file of weights in Hugging Face layout, in GB (10^9 bytes)."""
    keep_checkpoints: NonNegativeInt = 2
    """Number of newest checkpoints to keep; of older ones, the best by each evaluation data set is kept, too. 0 keeps
    all."""
    save_hf: File = None
    """Also export each checkpoint's model here, in Hugging Face layout; {rollout_id} is filled in."""
    async_save: bool = False
    """Go on while the checkpoint is written."""
    no_save_optim: bool = False
    """Leave the optimizer out of checkpoints."""
    no_save_rng: bool = False
    """Leave random number generators out of checkpoints."""
    no_load_optim: bool = False
    """Start with a fresh optimizer."""
    no_load_rng: bool = False
    """Start with freshly seeded random number generators."""
    finetune: bool = False
    """Take only the weights of --load and start with the first rollout."""
    ckpt_step: NonNegativeInt | None = None
    """Commit of --load by the number in its directory's name (3: rollout_0000003); the newest when not given."""
    ref_load: File = None
    """Model, commit or run directory of the reference; --hf-checkpoint when not given."""
    ref_ckpt_step: NonNegativeInt | None = None
    """Commit of --ref-load by the number in its directory's name; the newest when not given."""
    ref_update_interval: PositiveInt | None = None
    """Rollouts between copies of the policy into the reference."""


def _adapters(s: Settings) -> None:
    """Raise ConfigError for a setting of adapters without their rank."""
    fields = LoraArgs.model_fields.items()
    cited = [s.cite(name) for name, field in fields if getattr(s.args, name) != field.default]
    if cited and s.args.lora_rank is None:
        raise ConfigError(f"{', '.join(cited)}: without --lora-rank N there are no adapters.")


_BY_FILES = ("auto", "nccl", "disk")
"""Transports beside which a mode may be named: files, or nothing that says otherwise."""


def _weight_transport(s: Settings) -> None:
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


_NOTHING_DECAYS = "with {lr_decay_style}: nothing decays"
RULES: tuple[Rule, ...] = (
    Exclusive("lr_warmup_iters", "lr_warmup_fraction"),
    Refused(lambda a: a.min_lr > a.lr, "{min_lr} must not exceed {lr}."),
    NoEffect("min_lr", lambda a: a.min_lr and a.lr_decay_style == "constant", _NOTHING_DECAYS),
    NoEffect("lr_decay_iters", lambda a: a.lr_decay_style == "constant" and not a.lr_warmup_fraction, _NOTHING_DECAYS),
    Exclusive("only_train_params_name_list", "freeze_params_name_list"),
    _adapters,
    Refused(lambda a: len(set(a.lora_adapters)) < len(a.lora_adapters), "{lora_adapters}: give each name once."),
    Refused(lambda a: a.lora_dropout, "{lora_dropout}: log-probs of two passes over a sample must be equal; only 0."),
    _weight_transport,
)
