"""`ModelPreset` -> Megatron's flags: what `--model` sets, `slime models args` prints and `scripts/models/*.sh` hold.

The flags describe the model only; the user chooses parallelism, precision and speed. Layers that Megatron lacks come
from the family's plugin, found by config.json, so there is no `--spec`.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from slime_commands.models.numbers import Experts, LatentAttention, Numbers

if TYPE_CHECKING:
    from slime_commands.models.presets import ModelPreset


def megatron_flags(preset: ModelPreset) -> dict[str, Any]:
    """Return flag without dashes -> value; True for a switch."""
    n = preset.numbers
    flags: dict[str, Any] = {
        "num-layers": n.layers,
        "hidden-size": n.hidden_size,
        "ffn-hidden-size": n.ffn_size,
        "num-attention-heads": n.heads,
    }
    if n.latent:
        flags |= _latent(n, n.latent)
    else:
        flags |= {"group-query-attention": True, "num-query-groups": n.kv_groups, "kv-channels": n.head_size}
    flags |= {
        "vocab-size": n.vocab_size,
        "max-position-embeddings": n.max_positions,
        "normalization": "RMSNorm",
        "norm-epsilon": n.norm_epsilon,
        "position-embedding-type": "rope",
        "rotary-base": _whole(n.rope_base),
    }
    if n.rope_percent != 1.0:
        flags["rotary-percent"] = n.rope_percent
    if n.rope_scaling is not None and not n.latent:
        flags |= {"use-rope-scaling": True, "rope-scaling-factor": _whole(n.rope_scaling["factor"])}
    flags |= {"swiglu": True, "disable-bias-linear": True}
    if not n.tied:
        flags["untie-embeddings-and-output-weights"] = True
    if n.qkv_bias:
        flags["add-qkv-bias"] = True
    if n.qk_norm:
        flags["qk-layernorm"] = True
    if n.experts:
        flags |= _experts(n, n.experts)
    if n.delta_net:
        d = n.delta_net
        flags |= {
            "linear-attention-freq": d.interval,
            "linear-conv-kernel-dim": d.conv_kernel,
            "linear-key-head-dim": d.key_size,
            "linear-value-head-dim": d.value_size,
            "linear-num-key-heads": d.key_heads,
            "linear-num-value-heads": d.value_heads,
        }
    if n.indexer:
        flags |= {
            "dsa-indexer-n-heads": n.indexer.heads,
            "dsa-indexer-head-dim": n.indexer.head_size,
            "dsa-indexer-topk": n.indexer.keys,
        }
    return flags | dict(preset.megatron)


def _latent(n: Numbers, a: LatentAttention) -> dict[str, Any]:
    flags: dict[str, Any] = {"multi-latent-attention": True}
    if a.q_rank is not None:
        flags["q-lora-rank"] = a.q_rank
    flags |= {
        "kv-lora-rank": a.kv_rank,
        "qk-head-dim": a.qk_size,
        "qk-pos-emb-head-dim": a.rope_size,
        "v-head-dim": a.value_size,
    }
    scaling = n.rope_scaling
    if scaling is None:
        return {**flags, "rope-type": "rope"}
    return {
        **flags,
        "rope-type": scaling["rope_type"],
        "rotary-scaling-factor": _whole(scaling["factor"]),
        "beta-fast": _whole(scaling["beta_fast"]),
        "beta-slow": _whole(scaling["beta_slow"]),
        "mscale": scaling["mscale"],
        "mscale-all-dim": scaling["mscale_all_dim"],
    }


def _experts(n: Numbers, e: Experts) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "num-experts": e.number,
        "moe-router-topk": e.per_token,
        "moe-ffn-hidden-size": e.ffn_size,
    }
    if e.first_dense:
        flags["moe-layer-freq"] = f"[0]*{e.first_dense}+[1]*{n.expert_layers}"
    if e.shared_size:
        flags["moe-shared-expert-intermediate-size"] = e.shared_size
    if e.groups > 1:
        flags |= {"moe-router-num-groups": e.groups, "moe-router-group-topk": e.groups_per_token}
    if e.scaling != 1.0:
        flags["moe-router-topk-scaling-factor"] = e.scaling
    return flags


def flag_words(flags: dict[str, Any]) -> list[list[str]]:
    """Return one list of command-line words per flag."""
    return [[f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in flags.items()]


def bash_array(flags: dict[str, Any]) -> str:
    """Return `MODEL_ARGS=(...)`, a flag per line, quoted for bash."""
    lines = "\n".join("   " + shlex.join(words) for words in flag_words(flags))
    return f"MODEL_ARGS=(\n{lines}\n)\n"


def _whole(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value
