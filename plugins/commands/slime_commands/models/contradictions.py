"""Compare a preset with the `config.json` of a checkpoint and find the numbers that differ.

Called before a run with `--model` starts, for every trainer. Numbers that `config.json` does not state are not
compared: transformers leaves defaults out, and spells the same number in more than one way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from slime_commands.models.numbers import read_numbers
from slime_core.errors import ConfigError

if TYPE_CHECKING:
    from slime_commands.models.presets import ModelPreset
    from slime_core.config import Settings

_SAME = (
    ("num_experts", "n_routed_experts", "num_local_experts"),
    ("rope_parameters", "rope_scaling", "rope_theta"),
    ("rope_parameters", "partial_rotary_factor", "rotary_dim"),
)
"""Groups of alternative keys; a config.json has one key of each group."""

FLAGS: Mapping[str, str] = {
    "layers": "num-layers",
    "hidden_size": "hidden-size",
    "ffn_size": "ffn-hidden-size",
    "heads": "num-attention-heads",
    "kv_groups": "num-query-groups",
    "head_size": "kv-channels",
    "vocab_size": "vocab-size",
    "rope_base": "rotary-base",
    "rope_percent": "rotary-percent",
    "rope_scaling": "use-rope-scaling",
    "norm_epsilon": "norm-epsilon",
    "tied": "untie-embeddings-and-output-weights",
    "qkv_bias": "add-qkv-bias",
    "qk_norm": "qk-layernorm",
    "experts.number": "num-experts",
    "experts.per_token": "moe-router-topk",
    "experts.ffn_size": "moe-ffn-hidden-size",
    "experts.shared_size": "moe-shared-expert-intermediate-size",
    "experts.first_dense": "moe-layer-freq",
    "experts.groups": "moe-router-num-groups",
    "experts.groups_per_token": "moe-router-group-topk",
    "experts.scaling": "moe-router-topk-scaling-factor",
    "latent.q_rank": "q-lora-rank",
    "latent.kv_rank": "kv-lora-rank",
    "latent.qk_size": "qk-head-dim",
    "latent.rope_size": "qk-pos-emb-head-dim",
    "latent.value_size": "v-head-dim",
    "delta_net.interval": "linear-attention-freq",
    "delta_net.key_heads": "linear-num-key-heads",
    "delta_net.value_heads": "linear-num-value-heads",
    "delta_net.key_size": "linear-key-head-dim",
    "delta_net.value_size": "linear-value-head-dim",
    "delta_net.conv_kernel": "linear-conv-kernel-dim",
    "indexer.heads": "dsa-indexer-n-heads",
    "indexer.head_size": "dsa-indexer-head-dim",
    "indexer.keys": "dsa-indexer-topk",
}
"""Number -> the flag that sets it; other numbers follow from the family."""


@dataclass(frozen=True)
class Contradiction:
    """A number that has different values in preset and checkpoint."""

    flag: str
    """Flag of the number, without dashes."""
    preset: Any
    checkpoint: Any

    @property
    def text(self) -> str:
        """Text for messages, with flag and both values."""
        return f"--{self.flag}: {_shown(self.preset)} in the preset, {_shown(self.checkpoint)} in config.json"


def contradictions(preset: ModelPreset, hf: Mapping[str, Any]) -> list[Contradiction]:
    """Return every number that a checkpoint of the preset's family states differently.

    Args:
        preset: The preset that `--model` names.
        hf: The parsed config.json, of the same `model_type`.
    """
    ours = preset.config.get("text_config", preset.config)
    theirs = hf.get("text_config", hf)
    stated = _completed(ours, theirs, preset.numbers.rope_percent)
    found = read_numbers(stated, preset.megatron, preset.numbers.norms_per_layer)
    before, now = _flat(preset.numbers), _flat(found)
    return [
        Contradiction(flag, before[name], now[name])
        for name, flag in FLAGS.items()
        if name in before and before[name] != now[name]
    ]


def check_model(preset: ModelPreset, settings: Settings, hf: Mapping[str, Any]) -> None:
    """Raise ConfigError, with every number that differs, if a checkpoint is not the preset that `--model` names.

    Numbers that the user gave as Megatron flags are skipped, because the trainer compares them.

    Args:
        preset: The preset that `--model` names.
        settings: The run's settings.
        hf: The parsed config.json of `--hf-checkpoint`.
    """
    both = f"{settings.cite('model')} is not the model of {settings.cite('hf_checkpoint')}"
    if hf["model_type"] != preset.model_type:
        family = f"{preset.name} is of family {preset.model_type}, config.json says {hf['model_type']}"
        raise ConfigError(f"{both}: {family}")
    different = [found.text for found in contradictions(preset, hf) if not _is_given(settings, found.flag)]
    if different:
        lines = "\n".join(different)
        raise ConfigError(f"{both}:\n{lines}\nRemove --model, or name the checkpoint's own; `slime models list`.")


def _is_given(settings: Settings, flag: str) -> bool:
    """Return whether the user gave the flag, under any name of its value."""
    from slime_core.config.foreign import find_foreign, find_owners

    name = flag.replace("-", "_")
    owner = find_foreign(find_owners([], {})[0], name)
    origin = settings.origins.get(owner.parser({}).by_name[name].dest) if owner is not None else None
    return origin is not None and origin.kind in ("file", "env", "flag")


def _completed(ours: Mapping[str, Any], theirs: Mapping[str, Any], rope_percent: float) -> dict[str, Any]:
    """Return the checkpoint's config, with the preset's values for the keys that it leaves out."""
    replaced = {key for group in _SAME if any(name in theirs for name in group) for key in group}
    out = {key: value for key, value in ours.items() if key not in replaced} | dict(theirs)
    rope = dict(out.get("rope_parameters") or {})
    if rope or "rope_parameters" in out:
        rope.setdefault("rope_theta", out.get("rope_theta", ours.get("rope_theta")))
        rope.setdefault("partial_rotary_factor", out.get("partial_rotary_factor", rope_percent))
        out["rope_parameters"] = rope
    elif "rotary_dim" not in out:
        out.setdefault("partial_rotary_factor", rope_percent)
    return out


def _flat(numbers: Any, prefix: str = "") -> dict[str, Any]:
    """Return `Numbers` as name -> value, parts as "part.name"."""
    values: dict[str, Any] = {}
    for entry in fields(numbers):
        value = getattr(numbers, entry.name)
        values |= _flat(value, f"{entry.name}.") if is_dataclass(value) else {prefix + entry.name: value}
    return values


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {entry}" for key, entry in value.items())
    return "none" if value is None else str(value)
