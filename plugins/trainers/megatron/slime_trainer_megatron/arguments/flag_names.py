"""The table of Megatron's launch-script flags that are not fields of its configuration classes.

`flags.py` makes flags of them, `architecture.py` compares the `STATED` ones with config.json, and `config.py` reads the
rest. Each name is in exactly one of four groups: an alias of a field, a statement about the model, a feature that slime
has under that name, or a feature that it does not have, with the reason. The fields themselves come from megatron-core
and are in `owned.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["switch", "toggle", "int", "float", "str"]
"""Type of a flag; "toggle" means `--x` and `--no-x`."""

ALIASES: Mapping[str, str] = {
    "num-experts": "num_moe_experts",
    "decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    "num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "accumulate-allreduce-grads-in-fp32": "grad_reduce_in_fp32",
    "check-for-nan-in-loss-and-grad": "check_for_nan_in_grad",
    "ddp-bucket-size": "bucket_size",
    "ddp-average-in-collective": "average_in_collective",
    "ddp-pad-buckets-for-high-nccl-busbw": "pad_buckets_for_high_nccl_busbw",
    "ddp-reduce-scatter-with-fp32-accumulation": "reduce_scatter_with_fp32_accumulation",
    "rope-fusion": "apply_rope_fusion",
    "bias-swiglu-fusion": "bias_activation_fusion",
    "bias-gelu-fusion": "bias_activation_fusion",
    "overlap-p2p-communication": "overlap_p2p_comm",
    "use-gated-attention": "attention_output_gate",
    "moe-use-shared-expert-gate": "moe_shared_expert_gate",
}
"""Alias -> the field that it names. For a boolean field, `--no-...` and `--disable-...` are aliases too."""


@dataclass(frozen=True)
class Named:
    """A flag name without a field."""

    kind: Kind
    text: str
    """Statement of the flag, its effect in slime, or the reason why it has none (after "is without effect: ")."""
    same: tuple[Any, ...] = ()
    """Values of a refused name that match slime's behaviour and cause only a warning."""
    choices: tuple[str, ...] = ()
    default: Any = None
    is_list: bool = False


STATED: Mapping[str, Named] = {
    "swiglu": Named("switch", "The MLP has a gate with SiLU."),
    "squared-relu": Named("switch", "The MLP's activation is squared ReLU."),
    "quick-geglu": Named("switch", "The MLP has a gate with quick GELU."),
    "group-query-attention": Named("switch", "Several heads share keys and values."),
    "untie-embeddings-and-output-weights": Named("switch", "The output layer has a matrix of its own."),
    "position-embedding-type": Named("str", "Kind of position embedding."),
    "use-rotary-position-embeddings": Named("switch", "Positions are rotations."),
    "no-position-embedding": Named("switch", "There are no learned position embeddings."),
    "use-rope-scaling": Named("switch", "Rotations are scaled as in Llama 3."),
    "rope-scaling-factor": Named("float", "Factor of that scaling."),
    "full-attention-interval": Named("int", "Every so many layers one has full attention, the others linear."),
    "vocab-size": Named("int", "Size of the vocabulary."),
    "max-position-embeddings": Named("int", "Longest sequence the model was made for."),
}
"""Statements about the model; a contradiction to config.json is an error."""

OURS: Mapping[str, Named] = {
    "num-layers-per-virtual-pipeline-stage": Named("int", "Layers of each model chunk of the interleaved schedule."),
    "make-vocab-size-divisible-by": Named(
        "int",
        "Rows of the embedding on each tensor-parallel rank are a multiple of this; the added rows are never trained,"
        " predicted or exported.",
        default=1,
    ),
    "main-grads-dtype": Named(
        "str", "Dtype of gradients with --use-precision-aware-optimizer.", choices=("fp32", "bf16"), default="fp32"
    ),
    "main-params-dtype": Named(
        "str",
        "Dtype of the optimizer's weights with --use-precision-aware-optimizer.",
        choices=("fp32", "fp16"),
        default="fp32",
    ),
    "exp-avg-dtype": Named(
        "str",
        "Dtype of Adam's first moment with --use-precision-aware-optimizer.",
        choices=("fp32", "fp16", "bf16", "fp8"),
        default="fp32",
    ),
    "exp-avg-sq-dtype": Named(
        "str",
        "Dtype of Adam's second moment with --use-precision-aware-optimizer.",
        choices=("fp32", "fp16", "bf16", "fp8"),
        default="fp32",
    ),
    "use-flash-attn": Named("switch", "Old name of --attention-backend flash."),
    "enable-experimental": Named("switch", "Allows features that Megatron calls experimental."),
}
"""Flags that slime supports under this name."""

_STEPS = "slime counts rollouts; set --num-rollout or --num-epoch"
_SCHEDULE = "slime's schedule counts optimizer steps; set {}"
_TOKENIZER = "the tokenizer is that of --hf-checkpoint"
_CHECKPOINT = "slime decides how checkpoints are written, and finds out what it reads"
_LOGGING = "slime reports by itself"
_LOOP = "the loop is slime's"

_PROFILER = "--profile says where the time went, of a whole run"
_DATA = "samples come from --prompt-data, each in a row of its own"
_RESTARTS = "slime watches and ends its processes by itself"
_BATCHES = "set --global-batch-size and --max-tokens-per-gpu or --micro-batch-size"


def _each(words: str, text: str) -> dict[str, Named]:
    """Parse `name[:kind[=default]][*]` into entries; the default kind is a switch, and the star means a list."""
    found = {}
    for word in words.split():
        name, _, kind = word.removesuffix("*").partition(":")
        kind, _, default = kind.partition("=")
        value = int(default) if kind == "int" and default else default or None
        found[name] = Named(_KIND[kind], text, default=value, is_list=word.endswith("*"))
    return found


_KIND: Mapping[str, Kind] = {"": "switch", "int": "int", "str": "str", "float": "float"}

_OF_THE_LOOP: Mapping[str, Named] = {
    **_each(
        "log-energy timing-log-option:str=minmax tensorboard-log-interval:int=1 tensorboard-queue-size:int=1000"
        " log-timers-to-tensorboard no-log-loss-scale-to-tensorboard log-validation-ppl-to-tensorboard"
        " log-memory-to-tensorboard log-world-size-to-tensorboard log-batch-size-to-tensorboard"
        " log-learning-rate-to-tensorboard logging-level:int wandb-entity:str wandb-exp-name:str wandb-save-dir:str"
        " log-params-norm log-straggler disable-straggler-on-startup straggler-ctrlr-port:int=65535"
        " straggler-minmax-count:int=1 run-workload-inspector-server log-device-memory-used log-memory-interval:int"
        " enable-one-logger no-one-logger one-logger-project:str one-logger-run-name:str one-logger-async"
        " app-tag-run-name:str app-tag-run-version:str",
        _LOGGING,
    ),
    **_each(
        "profile-step-start:int=10 profile-step-end:int=12 use-pytorch-profiler profile-ranks:int*"
        " memory-snapshot-path:str",
        _PROFILER,
    ),
    **_each(
        "no-manual-gc-eval result-rejected-tracker-filename:str check-for-spiky-loss rerun-mode:str"
        " error-injection-rate:int error-injection-type:str train-sync-interval:int"
        " check-weight-hash-across-dp-replicas-interval:int",
        _LOOP,
    ),
    **_each(
        "exit-signal-handler exit-signal-handler-for-dataloader adlr-autoresume adlr-autoresume-interval:int"
        " local-rank:int lazy-mpu-init:str distributed-timeout-seconds-after-init:int disable-gloo-process-groups"
        " nccl-communicator-config-path:str use-sharp sharp-enabled-group:str high-priority-stream-groups:str*"
        " enable-ft-package calc-ft-timeouts inprocess-restart disable-msc",
        _RESTARTS,
    ),
    **_each(
        "save-retain-interval:int non-persistent-save-interval:int non-persistent-ckpt-type:str"
        " non-persistent-global-ckpt-dir:str non-persistent-local-ckpt-dir:str non-persistent-local-ckpt-algo:str"
        " use-checkpoint-args use-mp-args-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args"
        " no-ckpt-fully-parallel-save dist-ckpt-strictness:str dist-ckpt-save-pre-mcore-014"
        " dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient replication"
        " replication-jump:int replication-factor:int=2 load-main-params-from-ckpt no-strict-fsdp-dtensor-load"
        " exit-on-missing-checkpoint data-parallel-random-init",
        _CHECKPOINT,
    ),
    **_each(
        "data-cache-path:str no-mmap-bin-files encoder-seq-length:int decoder-seq-length:int"
        " retriever-seq-length:int=256 sample-rate:float mask-prob:float short-seq-prob:float reset-position-ids"
        " reset-attention-mask eod-mask-loss num-dataset-builder-threads:int=1 dataloader-type:str"
        " object-storage-cache-path:str mid-level-dataset-surplus:float allow-ambiguous-pad-tokens split:str",
        _DATA,
    ),
    **_each(
        "vocab-extra-ids:int tokenizer-metadata:str tiktoken-pattern:str tiktoken-num-special-tokens:int=1000"
        " tiktoken-special-tokens:str* legacy-tokenizer trust-remote-code",
        _TOKENIZER,
    ),
    **_each("full-validation multiple-validation-sets", "slime evaluates whole data sets; set --eval-interval"),
    **_each("no-scatter-gather-tensors-in-pipeline ddp-num-buckets:int", "it concerns speed alone"),
}
"""Flags used only by Megatron-LM's training loop and its set-up (megatron/training/arguments.py)."""

GRANTED: Mapping[str, Named] = {
    **_OF_THE_LOOP,
    "seq-length": Named("int", "micro-batches have the lengths of their samples"),
    "use-mcore-models": Named("switch", "there are no others"),
    "use-dist-ckpt": Named("switch", _CHECKPOINT),
    "auto-detect-ckpt-format": Named("switch", _CHECKPOINT),
    "ckpt-fully-parallel-save": Named("switch", _CHECKPOINT),
    "ckpt-fully-parallel-load": Named("switch", _CHECKPOINT),
    "ckpt-assume-constant-structure": Named("switch", _CHECKPOINT),
    "use-persistent-ckpt-worker": Named("switch", _CHECKPOINT),
    "use-checkpoint-opt-param-scheduler": Named(
        "switch", "the checkpoint's schedule is taken unless --override-opt-param-scheduler is given"
    ),
    "no-create-attention-mask-in-dataloader": Named("switch", "there is no data loader that could"),
    "train-iters": Named("int", _STEPS),
    "train-samples": Named("int", _STEPS),
    "eval-iters": Named("int", "slime evaluates whole data sets; set --eval-interval"),
    "log-interval": Named("int", _LOGGING),
    "log-throughput": Named("switch", _LOGGING),
    "log-progress": Named("switch", _LOGGING),
    "timing-log-level": Named("int", _LOGGING),
    "tensorboard-dir": Named("str", "set --use-tensorboard"),
    "num-workers": Named("int", "there are no data loader processes"),
    "manual-gc": Named("switch", _LOOP),
    "manual-gc-interval": Named("int", _LOOP),
    "empty-unused-memory-level": Named("int", _LOOP),
    "align-grad-reduce": Named("toggle", "gradients are reduced once, after the last micro-batch"),
    "disable-param-buffers-cpu-backup": Named("switch", "slime moves no parameter buffers to the host"),
    "disable-grad-buffers-cpu-backup": Named("switch", "slime moves no gradient buffers to the host"),
    "tokenizer-type": Named("str", _TOKENIZER),
    "tokenizer-model": Named("str", _TOKENIZER),
    "vocab-file": Named("str", _TOKENIZER),
    "merge-file": Named("str", _TOKENIZER),
    "post-self-attn-layernorm": Named("switch", "the model family's plugin brings its norms"),
    "post-mlp-layernorm": Named("switch", "the model family's plugin brings its norms"),
    "moe-layer-recompute-interval": Named("int", "this Megatron has only --moe-layer-recompute"),
}
"""Flags without effect: slime always behaves like this, or has no such part; all cause one warning."""

REFUSED: Mapping[str, Named] = {
    "spec": Named(
        "str",
        "the model family's plugin brings its layers; for a model of your own set --custom-model-provider-path",
        is_list=True,
    ),
    "params-dtype": Named("str", "set --dtype or --bf16"),
    "pretrained-checkpoint": Named("str", "set --load with --finetune, or --hf-checkpoint"),
    "ckpt-format": Named("str", _CHECKPOINT, same=("torch_dist",)),
    "dist-ckpt-format": Named("str", _CHECKPOINT, same=("torch_dist",)),
    "no-load-strict": Named(
        "switch", "a checkpoint that does not fit is an error; for its weights alone set --finetune"
    ),
    "rampup-batch-size": Named(
        "str", "the batch does not grow; set --rollout-batch-size and --global-batch-size", is_list=True
    ),
    "lr-warmup-samples": Named("int", _SCHEDULE.format("--lr-warmup-iters"), same=(0,)),
    "lr-decay-samples": Named("int", _SCHEDULE.format("--lr-decay-iters")),
    "start-weight-decay": Named("float", "weight decay does not change; set --weight-decay"),
    "end-weight-decay": Named("float", "weight decay does not change; set --weight-decay"),
    "weight-decay-incr-style": Named("str", "weight decay does not change; set --weight-decay", same=("constant",)),
    "exit-interval": Named("int", _STEPS),
    "exit-duration-in-mins": Named("int", _STEPS),
    "use-tp-pp-dp-mapping": Named("switch", "ranks are ordered tensor, context, expert, data, pipeline; remove it"),
    "hybrid-override-pattern": Named("str", "there are no Mamba models here; remove it"),
    "hybrid-layer-pattern": Named("str", "there are no Mamba models here; remove it"),
    "init-method-xavier-uniform": Named("switch", "weights come from a checkpoint; remove it"),
    **_each("lr-wsd-decay-samples:int warmup:int", _SCHEDULE.format("--lr-wsd-decay-iters or --lr-warmup-iters")),
    **_each("batch-size:int decrease-batch-size-if-needed iterations-to-skip:int*", _BATCHES),
    **_each("checkpoint-activations", "set --recompute-granularity"),
    **_each("model-parallel-size:int", "set --tensor-model-parallel-size"),
    **_each("ckpt-convert-format:str ckpt-convert-save:str", "type slime convert"),
    **_each("skip-train", "type slime eval"),
    **_each(
        "data-path:str* train-data-path:str* valid-data-path:str* test-data-path:str* data-args-path:str"
        " per-split-data-args-path:str mock-data",
        "set --prompt-data",
    ),
    **_each("use-legacy-models openai-gelu onnx-safe", "there are only Megatron Core's models here; remove it"),
    **_each("use-torch-fsdp2", "slime wraps models in Megatron's DistributedDataParallel; remove it"),
    **_each("grad-reduce-in-bf16", "set --no-accumulate-allreduce-grads-in-fp32"),
    **_each("yaml-cfg:str", "settings in YAML are a --config file"),
    **_each("perform-rl-step", "set --advantage-estimator; this is slime's own loop"),
}
"""Flags that would change the computation and are not supported; an error names the alternative."""

TAKEN_SPECS = "slime_plugins.models."
"""Values of `--spec` with THUDM/slime's own modules; the plugins of model families implement their changes."""

SPEC_FAMILIES: Mapping[str, str] = {"glm5": "glm_moe_dsa", "qwen3_5_vl": "qwen3_5"}
"""Module below `TAKEN_SPECS` -> `model_type` of its checkpoints, if the module has another name."""


def without_field() -> dict[str, Named]:
    """Return every name above except the aliases."""
    return {**STATED, **OURS, **GRANTED, **REFUSED}
