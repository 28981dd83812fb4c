"""HF `config.json` -> `ModelConfig`, the architecture numbers both embedded sides build from.

A model family is a plugin of kind `models`, named by HF's `model_type`: a function that takes the parsed
`config.json` and returns a `ModelConfig`. The families differ only in the switches below.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import ConfigError, PluginNotFoundError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of SwiGLU experts in place of the feed-forward block of some layers."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Width of each expert."""
    normalize_top_k: bool
    """Divide the router probabilities of the chosen experts by their sum."""
    layers: tuple[int, ...]
    """Numbers of the layers that have experts."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, dense or with experts."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    """HF's `rope_scaling` / `rope_parameters` without the theta; None for plain rotary positions."""
    max_position_embeddings: int
    tie_word_embeddings: bool
    initializer_range: float = 0.02
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim on queries and keys, before the rotation (Qwen3)."""
    moe: MoEConfig | None = None
    """None: a dense decoder."""
    images: bool = False
    """A vision-language model: the numbers here are its language model's, and `build` makes all of it."""
    build: Callable[[ModelConfig, str, torch.device], torch.nn.Module] | None = None
    """Make the `slime_embedded.models.decoder.Decoder` to train, float32 on the device, from an HF-layout directory;
    None: a decoder of these numbers. With `images` its `hidden` takes the keyword `images`, a `TrainInputs` or None
    of each sequence."""
    eos_token_ids: tuple[int, ...] = ()
    hf: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The whole `config.json`."""

    def experts_of(self, layer: int) -> MoEConfig | None:
        """Return the experts of a layer, None for a dense layer."""
        return self.moe if self.moe is not None and layer in self.moe.layers else None

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], *, moe: MoEConfig | None = None, **switches: Any) -> ModelConfig:
        """Read the fields HF names alike in Llama, Qwen2 and Qwen3; `switches` say what the family does differently.

        Raises:
            ConfigError: A field is missing or the activation is not SiLU.
        """
        activation = hf.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ConfigError(f"config.json: hidden_act {activation!r} is not supported; allowed: silu")
        try:
            heads = _whole(hf["num_attention_heads"])
            hidden = _whole(hf["hidden_size"])
            rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
            theta = rope.pop("rope_theta", hf.get("rope_theta"))
            if rope.get("rope_type", rope.get("type", "default")) == "default":
                rope = {}
            eos = hf.get("eos_token_id")
            made = cls(
                model_type=str(hf["model_type"]),
                vocab_size=_whole(hf["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=_whole(hf["intermediate_size"]),
                num_layers=_whole(hf["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=_whole(hf.get("num_key_value_heads") or heads),
                head_dim=_whole(hf.get("head_dim") or hidden // heads),
                rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
                rope_theta=10000.0 if theta is None else float(theta),
                rope_scaling=rope or None,
                max_position_embeddings=_whole(hf.get("max_position_embeddings", 2048)),
                tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
                initializer_range=float(hf.get("initializer_range", 0.02)),
                eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (int(eos),)),
                hf=dict(hf),
                moe=moe,
                **switches,
            )
        except KeyError as error:
            raise ConfigError(f"config.json has no {error.args[0]!r}, which every decoder needs") from error
        except (TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
            raise ConfigError(f"config.json: a size of the model is not a whole number, or 0: {error}") from error
        if not 0 < made.rope_theta < math.inf or not 0 <= made.rms_norm_eps < 1:
            numbers = f"rope_theta is {made.rope_theta}, rms_norm_eps is {made.rms_norm_eps}"
            raise ConfigError(f"config.json: {numbers}; allowed: above 0, and 0 to 1")
        for name, most in _LARGEST.items():
            if not 1 <= getattr(made, name) <= most:
                raise ConfigError(f"config.json: {name} is {getattr(made, name)}; allowed: 1 to {most}")
        return made


def _whole(value: float | str) -> int:
    number = int(value)
    if number != value:
        raise ValueError(f"{value!r}")
    return number


_LARGEST = {
    "vocab_size": 10**8, "hidden_size": 10**6, "intermediate_size": 10**7, "num_layers": 10**4, "num_heads": 10**4,
    "num_kv_heads": 10**4, "head_dim": 10**5, "max_position_embeddings": 10**9,
}  # fmt: skip
"""Sizes beyond which a `config.json` is of no model that there is."""


def read_hf_config(directory: str | Path) -> dict[str, Any]:
    """Return the parsed `config.json` of an HF-layout directory. Raises ConfigError if it cannot be read."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{directory}: no HF-layout model here (no config.json)")
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(hf, dict) or "model_type" not in hf:
        raise ConfigError(f"{path}: no 'model_type'")
    return hf


def family_plugin(kind: str, family: str, origin: str) -> Any:
    """Return the plugin of a model family. Raises PluginNotFoundError with the families that have one."""
    from slime_core.plugins.resolve import resolve

    try:
        return resolve(kind, family, origin=origin).obj
    except PluginNotFoundError as error:
        raise PluginNotFoundError(
            f"{error}. Type --hf-checkpoint with a model of one of these families (`slime models list` names their"
            " trainers), or write the family's plugin: docs/plugins/models.md"
        ) from error


def load_model_config(directory: str | Path) -> ModelConfig:
    """Return the result of the family plugin that `config.json` names. Raises ConfigError or PluginNotFoundError."""
    hf = read_hf_config(directory)
    config = family_plugin("models", str(hf["model_type"]), f"{directory}/config.json: model_type")(hf)
    assert isinstance(config, ModelConfig), f"model family {hf['model_type']} returned {type(config)}"
    stored = sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
    dense = 3 * config.intermediate_size if config.moe is None else 0
    each = config.hidden_size * (2 * config.num_heads * config.head_dim + dense)
    # Embeddings, queries, outputs of attention and dense feed-forward: the model has at least these.
    least = config.vocab_size * config.hidden_size + config.num_layers * each
    if 0 < stored < least:
        raise ConfigError(
            f"{directory}: config.json is of a model of {least:,} parameters or more, and the weights"
            f" (*.safetensors) have {stored:,} bytes; it is another model's, or files are missing or cut"
        )
    return config


def vocab_size_of(directory: str | Path) -> int:
    """Return the number of token ids, also of a family that has no plugin of this kind. Raises ConfigError."""
    try:
        return load_model_config(directory).vocab_size
    except PluginNotFoundError:
        hf = read_hf_config(directory)
        size = hf.get("text_config", hf).get("vocab_size")
    if not isinstance(size, int):
        raise ConfigError(f"{directory}/config.json: no 'vocab_size'")
    return size
