"""Building blocks for plugins of kind "megatron_models"; imports neither torch nor Megatron.

`family.py` defines the interface of a family, `weight_map.py` has the merges and rows of most models, `deepseek.py` has
the parts that DeepSeek-V3's descendants share, and `shape.py` describes models to the core.
"""

from slime_trainer_megatron.families.deepseek import (
    LATENT_NORM_EPS,
    carried_layers,
    decoder_rows,
    first_dense,
    latent_attention_model,
    latent_attention_rows,
    latent_norm_spec,
    routing_fields,
)
from slime_trainer_megatron.families.family import (
    Architecture,
    MegatronModel,
    Merge,
    Place,
    Row,
    decoder_architecture,
    load_megatron_model,
    places,
    refuse,
    rope_of,
)
from slime_trainer_megatron.families.weight_map import (
    HEAD,
    LAYER,
    QKV,
    Columns,
    Gated,
    GatedFused,
    Rows,
    Whole,
    attention_rows,
    critic_of,
    dense_mlp_rows,
    embedding_rows,
    expert_rows,
)

__all__ = [
    "Architecture",
    "Columns",
    "Gated",
    "GatedFused",
    "HEAD",
    "LATENT_NORM_EPS",
    "LAYER",
    "MegatronModel",
    "Merge",
    "Place",
    "QKV",
    "Row",
    "Rows",
    "Whole",
    "attention_rows",
    "carried_layers",
    "critic_of",
    "decoder_architecture",
    "decoder_rows",
    "dense_mlp_rows",
    "embedding_rows",
    "expert_rows",
    "first_dense",
    "latent_attention_model",
    "latent_attention_rows",
    "latent_norm_spec",
    "load_megatron_model",
    "places",
    "refuse",
    "rope_of",
    "routing_fields",
]
