"""Names and numbers of our maps against those of mbridge, which was written by others from the same model files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_trainer_megatron.families import places

from slime_core.models.hf_io import read_weights
from tests.megatron_models import FAMILIES, family, save_tiny

pytestmark = pytest.mark.backends


def of_transformer_engine(name: str, *, sparse: bool) -> str:
    """mbridge knows the names of Transformer Engine's layers only."""
    name = re.sub(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$", r".experts.\2.weight\1", name)
    name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return name if sparse else name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")


def bridge_of(directory: Path) -> Any:
    """The bridge without its configuration, which needs Transformer Engine."""
    from mbridge.core.bridge import _MODEL_REGISTRY
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory)
    kind = _MODEL_REGISTRY[config.model_type]
    bridge = kind.__new__(kind)
    bridge.hf_config, bridge.dtype, bridge.make_vocab_size_divisible_by = config, torch.float32, None
    return bridge


@pytest.mark.parametrize("variant", [name for name in FAMILIES if name in ("llama", "qwen2", "qwen3", "qwen3-moe")])
def test_our_maps_are_theirs(variant: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, variant)
    files, bridge, model = dict(read_weights(tmp_path)), bridge_of(tmp_path), family(tmp_path)
    sparse = {place.layer for place in places(model) if "router" in place.megatron}
    for place in places(model):
        theirs = of_transformer_engine(place.megatron, sparse=place.layer in sparse)
        assert bridge._weight_name_mapping_mcore_to_hf(theirs) == list(place.hf), theirs
        whole = [files[name] for name in place.hf]
        ours = place.row.merge.to_megatron(whole, 0, 1)
        assert torch.equal(bridge._weight_to_mcore_format(theirs, whole), ours), theirs
        names, back = bridge._weight_to_hf_format(theirs, ours)
        assert names == list(place.hf)
        assert all(torch.equal(one, other) for one, other in zip(back, whole)), theirs
