"""Flags that belong to somebody else: Megatron's own, an engine's server's (`--sglang-*`), its router's (`--router-*`).

They are collected as attributes of `args` under their own names and change nothing in the core. A `ForeignFlags`
object is one owner's list; an engine or trainer brings its own by an entry point of the group `slime.foreign_flags`
(see `foreign`), with its name in `used_by`. Flags given although nobody in `used_by` is selected end in one warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from slime_core.config.origins import Entry

ForeignKind = Literal["switch", "toggle", "int", "float", "size", "str", "json", "any"]
"""switch: `--x`, true when given; toggle: `--x` and `--no-x`; size: a whole number that may end in k, M, Ki, ...;
any: what the text reads as."""


@dataclass(frozen=True)
class ForeignFlag:
    """One flag of another program."""

    name: str
    """Without the leading dashes."""
    kind: ForeignKind = "any"
    is_list: bool = False
    aliases: tuple[str, ...] = ()
    """Its other names; all set the same attribute."""
    stored_as: str = ""
    """Name on `args` when it is not the flag's name with underscores."""
    choices: tuple[Any, ...] = ()
    """Allowed values, of a list's elements; empty when any is allowed."""
    count: int | None = None
    """How many values a list has; None is any number."""
    may_be_empty: bool = False
    """A list of no values is allowed, and for another kind the flag without a value, which stores `const`."""
    const: Any = None
    default: Any = None
    """The other program's own, for the help text; nothing is stored when the flag is not given."""
    help: str = ""

    @property
    def attribute(self) -> str:
        """Name on `args`."""
        return self.stored_as or self.name.replace("-", "_")

    @property
    def names(self) -> tuple[str, ...]:
        """Every spelling that stores the value, without dashes."""
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class FlagList:
    """Every flag of an owner whose flags are known by prefix, as one version of the program has them."""

    flags: tuple[ForeignFlag, ...]
    version: str
    """For messages, such as "SGLang 0.5.20"."""

    @cached_property
    def by_name(self) -> dict[str, ForeignFlag]:
        """Every name, with underscores, and every attribute -> flag."""
        names = {name.replace("-", "_"): flag for flag in self.flags for name in flag.names}
        return {flag.attribute: flag for flag in self.flags} | names


@dataclass(frozen=True)
class ForeignFlags:
    """One owner's flags."""

    owner: str
    flags: tuple[ForeignFlag, ...] = ()
    prefixes: tuple[str, ...] = ()
    """Any flag beginning so is the owner's, e.g. "sglang-"."""
    used_by: tuple[str, ...] = ()
    """Names of the trainers and engines that take these flags."""
    listing: Callable[[Mapping[str, Any]], FlagList] | None = None
    """All flags behind the prefixes, asked for only when one is given; the argument is what was given of slime's own
    settings, as it was spelled. Without it such a flag may have any name and value. May raise ConfigError."""
    help_flag: str = ""
    """Prints that list, such as "help-sglang"."""
    check: Callable[[Any, Mapping[str, Entry]], Sequence[str]] | None = None
    """Called with the finished `args` and the owner's entries (by attribute) when there are any; returns warnings and
    may raise ConfigError."""

    @cached_property
    def by_attribute(self) -> dict[str, ForeignFlag]:
        """Attribute on `args`, or another name with underscores -> flag, of those that need no listing."""
        return FlagList(self.flags, self.owner).by_name

    def find(self, attribute: str) -> ForeignFlag | None:
        """The flag behind an attribute name, if it is this owner's; of any kind when only its prefix is known."""
        if attribute in self.by_attribute:
            return self.by_attribute[attribute]
        dashed = attribute.replace("_", "-")
        return ForeignFlag(dashed) if any(dashed.startswith(p) for p in self.prefixes) else None


def find_foreign(foreign: Sequence[ForeignFlags], attribute: str) -> tuple[ForeignFlags, ForeignFlag] | None:
    """Owner and flag of an attribute name."""
    for owner in foreign:
        flag = owner.find(attribute)
        if flag is not None:
            return owner, flag
    return None


def _flags(kind: ForeignKind, names: str, *, is_list: bool = False) -> tuple[ForeignFlag, ...]:
    return tuple(ForeignFlag(name, kind, is_list) for name in names.split())


MEGATRON = ForeignFlags(
    owner="Megatron",
    flags=(
        *_flags(
            "int",
            """
            tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size expert-model-parallel-size
            expert-tensor-parallel-size decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
            num-layers-per-virtual-pipeline-stage empty-unused-memory-level virtual-pipeline-model-parallel-size
            recompute-num-layers num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels
            max-position-embeddings seq-length rotary-base rotary-scaling-factor vocab-size make-vocab-size-divisible-by
            num-experts moe-layer-recompute-interval moe-router-topk moe-router-num-groups moe-router-group-topk
            moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-deepep-num-sms
            q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
            rampup-batch-size train-iters train-samples lr-warmup-samples lr-decay-samples log-interval num-workers
            timing-log-level manual-gc-interval exit-interval exit-duration-in-mins
            linear-key-head-dim linear-value-head-dim linear-num-key-heads linear-num-value-heads
            linear-conv-kernel-dim window-size full-attention-interval
            """,
        ),
        *_flags(
            "float",
            """
            norm-epsilon rotary-percent attention-dropout hidden-dropout init-method-std
            moe-aux-loss-coeff moe-z-loss-coeff moe-router-bias-update-rate moe-router-topk-scaling-factor
            moe-input-jitter-eps moe-expert-capacity-factor optimizer-offload-fraction start-weight-decay
            end-weight-decay decoupled-min-lr decoupled-lr sgd-momentum loss-scale initial-loss-scale min-loss-scale
            mscale mscale-all-dim beta-fast beta-slow softmax-scale
            """,
        ),
        *_flags(
            "str",
            """
            recompute-method normalization position-embedding-type attention-backend transformer-impl
            moe-router-load-balancing-type moe-token-dispatcher-type moe-router-score-function moe-router-dtype
            moe-flex-dispatcher-backend
            weight-decay-incr-style main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype
            tokenizer-type tokenizer-model vocab-file merge-file ckpt-format dist-ckpt-format
            pretrained-checkpoint rope-type cp-comm-type pipeline-model-parallel-layout fp8-format fp8-recipe
            moe-layer-freq hybrid-override-pattern mamba-state-dim params-dtype tensorboard-dir 
            experimental-attention-variant
            """,
        ),
        *_flags("any", "spec recompute-modules", is_list=True),
        *_flags(
            "switch",
            """
            sequence-parallel group-query-attention use-rotary-position-embeddings rotary-interleaved swiglu
            disable-bias-linear add-qkv-bias add-bias-linear qk-layernorm untie-embeddings-and-output-weights
            accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 apply-layernorm-1p squared-relu
            optimizer-cpu-offload overlap-cpu-optimizer-d2h-h2d use-precision-aware-optimizer use-distributed-optimizer
            overlap-grad-reduce overlap-param-gather no-rope-fusion no-bias-swiglu-fusion no-masked-softmax-fusion
            no-persist-layer-norm no-gradient-accumulation-fusion no-bias-dropout-fusion 
            no-check-for-nan-in-loss-and-grad
            no-initialization no-load-strict moe-grouped-gemm moe-permute-fusion moe-router-pre-softmax
            moe-router-enable-expert-bias moe-router-force-load-balancing moe-shared-expert-overlap
            moe-shared-expert-gate moe-use-shared-expert-gate moe-enable-deepep moe-extended-tp
            multi-latent-attention use-gated-attention attention-output-gate apply-residual-connection-post-layernorm
            use-rope-scaling post-self-attn-layernorm post-mlp-layernorm use-dist-ckpt use-flash-attn
            use-mcore-models use-cpu-initialization 
            use-checkpoint-opt-param-scheduler no-create-attention-mask-in-dataloader
            distribute-saved-activations align-grad-reduce log-throughput manual-gc variable-seq-lengths
            ckpt-fully-parallel-save ckpt-fully-parallel-load auto-detect-ckpt-format enable-experimental
            disable-param-buffers-cpu-backup disable-grad-buffers-cpu-backup
            """,
        ),
    ),
)

BUILT_IN: tuple[ForeignFlags, ...] = (MEGATRON,)
"""Known without an entry point."""
