"""Definition of a model family for a Megatron-core trainer: its architecture numbers and a name-and-shape map.

A component of kind "megatron_models", named by HF's `model_type`: a function from the parsed `config.json` to a
`MegatronModel`. The map is read in both directions, HF -> Megatron to load and Megatron -> HF to save and to sync
weights; `weight_map` has the merges and rows of most models. Nothing here imports Megatron. The names are those of
Megatron's local layer spec, also where Transformer Engine's layers run; the trainer translates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from slime_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

Split = Literal["replicated", "tensor", "expert_tensor"]
"""Ranks over which a Megatron parameter is split: none, the tensor-parallel ranks, or the experts' ranks."""


class Merge(Protocol):
    """Conversion of a row's HF tensors to a Megatron parameter, and back; `weight_map` has those of most models.

    Subclass it: `read_axis` has a default.
    """

    def to_megatron(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """Convert whole HF tensors to part `rank` of `size` of the Megatron parameter."""

    def to_hf(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Convert every rank's part, in order, to whole HF tensors."""

    def read_axis(self, size: int) -> int | None:
        """Return the axis on which every HF tensor may be cut into `size` equal parts, to save memory.

        `to_megatron(cut, 0, 1)` of the parts `rank` makes the rank's parameter. None, the default: a rank reads whole
        tensors.
        """
        return None


@dataclass(frozen=True)
class Row:
    """A Megatron parameter, or a parameter of every layer and expert, and the HF tensors that it is made of.

    `{layer}` and `{expert}` in names are numbers over the whole model, never over a stage or rank.
    """

    megatron: str
    """Name in the local layer spec, such as "decoder.layers.{layer}.self_attention.linear_qkv.weight"."""
    hf: tuple[str, ...]
    """Names in the safetensors files, such as ("model.layers.{layer}.self_attn.q_proj.weight", ...)."""
    merge: Merge
    split: Split = "tensor"
    layers: tuple[int, ...] | None = None
    """Layers that have the parameter, for a row with `{layer}`; None means all."""
    vocabulary: bool = False
    """True if the first axis is the vocabulary, which Megatron may pad at the end."""


@dataclass(frozen=True)
class Architecture:
    """A `config.json` in Megatron's terms."""

    transformer: Mapping[str, Any]
    """Fields of `TransformerConfig`, or of `MLATransformerConfig` with `multi_latent_attention` True, that describe the
    model; no fields of parallelism, precision or speed. `activation_func` is the callable."""
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rotary_base: float
    rotary_percent: float = 1.0
    rope_scaling: Mapping[str, Any] | None = None
    """HF's rope scaling of type "llama3"; None for plain. Other types are fields of `transformer`, as YaRN for MLA."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further values for the family's own `layer_spec`."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return int(self.transformer["num_layers"])

    @property
    def num_experts(self) -> int:
        """Number of routed experts of a layer; 0 for a dense model."""
        return int(self.transformer.get("num_moe_experts") or 0)


@dataclass(frozen=True)
class MegatronModel:
    """A model of a family."""

    architecture: Architecture
    rows: Sequence[Row]
    """Rows with every parameter of the model exactly once."""
    layer_spec: Callable[..., Any] | None = None
    """`(spec, config, architecture, layer)` -> Megatron's `ModuleSpec` of layer number `layer` (over the whole model,
    from 0), for families whose layers differ from Megatron's own; else None. It imports Megatron inside."""
    carried: tuple[str, ...] = ()
    """Regular expressions of HF names without a place in the model (multi-token prediction): copied on save."""
    ignored: tuple[str, ...] = (r"lm_head\.weight", r".*\.rotary_emb\.inv_freq")
    """Regular expressions of HF names that files may have and that other tensors determine: a tied output layer."""


class Place(NamedTuple):
    """A parameter of the whole model: a row with its layer and expert numbers."""

    row: Row
    layer: int | None
    """Layer number; None for a row without `{layer}`."""
    expert: int | None

    @property
    def megatron(self) -> str:
        """The name over the whole model, such as "decoder.layers.3.mlp.linear_fc2.weight"."""
        return self.row.megatron.format(layer=self.layer, expert=self.expert)

    @property
    def hf(self) -> tuple[str, ...]:
        """The names in the HF files."""
        return tuple(name.format(layer=self.layer, expert=self.expert) for name in self.row.hf)


def places(model: MegatronModel) -> Iterator[Place]:
    """Yield every parameter of the whole model in the order of export: the embedding, each layer in the order of the
    rows (all experts of a row together), then the parameters after the layers."""
    outside = [row for row in model.rows if "{layer}" not in row.megatron]
    of_layers = [row for row in model.rows if "{layer}" in row.megatron]
    yield from (Place(row, None, None) for row in outside if row.megatron.startswith("embedding."))
    for layer in range(model.architecture.num_layers):
        for row in of_layers:
            if row.layers is not None and layer not in row.layers:
                continue
            if "{expert}" in row.megatron:
                yield from (Place(row, layer, expert) for expert in range(model.architecture.num_experts))
            else:
                yield Place(row, layer, None)
    yield from (Place(row, None, None) for row in outside if not row.megatron.startswith("embedding."))


def rope_of(hf: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Return the rotary base of `config.json`, and HF's rope scaling without the base (None for plain positions).

    transformers writes `rope_parameters`; older files have `rope_theta` and `rope_scaling`.
    """
    scaling = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    base = float(scaling.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return base, None if kind == "default" else scaling


def decoder_architecture(hf: Mapping[str, Any], **transformer: Any) -> Architecture:
    """Read the fields that HF names alike in most decoders: RMSNorm, SiLU-gated feed-forward blocks, rotary positions
    (plain or "llama3"), grouped-query attention, no biases.

    Args:
        hf: The parsed `config.json`.
        transformer: Fields of `TransformerConfig` that the family adds or has otherwise.

    Raises:
        ConfigError: A field is missing, or has a value that Megatron's layers do not compute.
    """
    from torch.nn import functional

    activation = hf.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act {activation!r} is not supported; allowed: silu")
    base, scaling = rope_of(hf)
    kind = None if scaling is None else scaling.get("rope_type", scaling.get("type"))
    if kind not in (None, "llama3"):
        raise ConfigError(f"config.json: rope type {kind!r} is not supported; allowed: default, llama3")
    partial = (hf.get("rope_parameters") or {}).get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    try:
        heads, hidden = int(hf["num_attention_heads"]), int(hf["hidden_size"])
        fields = {
            "num_layers": int(hf["num_hidden_layers"]),
            "hidden_size": hidden,
            "ffn_hidden_size": int(hf["intermediate_size"]),
            "num_attention_heads": heads,
            "num_query_groups": int(hf.get("num_key_value_heads") or heads),
            "kv_channels": int(hf.get("head_dim") or hidden // heads),
            "normalization": "RMSNorm",
            "layernorm_epsilon": float(hf.get("rms_norm_eps", 1e-6)),
            "gated_linear_unit": True,
            "activation_func": functional.silu,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "qk_layernorm": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "init_method_std": float(hf.get("initializer_range", 0.02)),
        }
        return Architecture(
            transformer=fields | transformer,
            vocab_size=int(hf["vocab_size"]),
            max_position_embeddings=int(hf.get("max_position_embeddings", 2048)),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            rotary_base=base,
            rotary_percent=float(partial),
            rope_scaling=scaling,
        )
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]!r}, which every decoder needs") from error


def refuse(hf: Mapping[str, Any], **unsupported: Any) -> None:
    """Raise ConfigError for the first of these fields of `config.json` that has a true value.

    The value given is what is allowed, for the message: `refuse(hf, use_sliding_window=False)`.
    """
    for name, allowed in unsupported.items():
        if hf.get(name):
            raise ConfigError(f"config.json: {name} {hf[name]!r} is not supported; allowed: {allowed!r}")


def load_megatron_model(directory: str | Path) -> MegatronModel:
    """Return the model from the family plugin that `config.json` names. Raises ConfigError or PluginNotFoundError."""
    from slime_core.models.config import family_plugin, read_hf_config

    hf = read_hf_config(directory)
    model = family_plugin("megatron_models", str(hf["model_type"]), f"{directory}/config.json: model_type")(hf)
    assert isinstance(model, MegatronModel), f"model family {hf['model_type']} returned {type(model)}"
    return model
