"""Parallel sizes: what divides what, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from slime_trainer_megatron.layout import Layout

from slime_core.config import Args
from slime_core.errors import ConfigError

NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
    "embedding": "account_for_embedding_in_pipeline_split",
    "loss": "account_for_loss_in_pipeline_split",
}


def layout(num_layers: int | None = None, **flags: Any) -> Layout:
    return Layout.from_args(Args(**{NAMES.get(k, k): v for k, v in flags.items()}), num_layers)


@pytest.mark.parametrize(
    ("layers", "flags", "message"),
    [
        (None, {"tp": 0}, "--tensor-model-parallel-size 0: at least 1"),
        (None, {"vpp": 2}, "--virtual-pipeline-model-parallel-size: needs --pipeline-model-parallel-size"),
        (None, {"last": 2}, "--decoder-last-pipeline-num-layers 2: needs --pipeline-model-parallel-size"),
        (7, {"pp": 2}, "7 of the model's 7 layers cannot be spread evenly over 2 stages"),
        (8, {"pp": 2, "embedding": True}, r"9 of the model's 8 layers \(counted as 9\) cannot be spread"),
        (8, {"pp": 2, "first": 3, "vpp": 2}, "--decoder-first-pipeline-num-layers 3: not divisible into 2 chunks"),
        (8, {"pp": 2, "first": 3, "last": 5, "embedding": True}, "--account-for-embedding-in-pipeline-split"),
        (8, {"pp": 2, "num_layers_per_virtual_pipeline_stage": 3}, "8 layers over 2 stages cannot be cut into such"),
        (8, {"pp": 2, "vpp": 2, "num_layers_per_virtual_pipeline_stage": 2}, "says the same; remove one"),
    ],
)
def test_contradictions(layers: int | None, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout(layers, **flags)


def test_ranks_hold_whole_copies() -> None:
    with pytest.raises(ConfigError, match="6 ranks cannot hold whole copies of a model over 4 ranks"):
        Layout(tensor=2, pipeline=2).data_size(6)
    with pytest.raises(ConfigError, match="2 ranks cannot hold"):
        Layout(tensor=4).data_size(2)
    with pytest.raises(ConfigError, match="6 ranks cannot hold whole copies of experts over 4 ranks"):
        Layout(expert=4).data_size(6)
    assert Layout(tensor=2, expert=4, expert_tensor=1).data_size(4) == 2


@pytest.mark.parametrize(
    ("sizes", "transformer", "message"),
    [
        ({"tensor": 3}, {}, "does not divide the model's 4 attention heads"),
        ({"expert": 2, "expert_tensor": 1}, {}, "the model has no experts"),
        ({"expert": 3}, {"num_moe_experts": 8}, "does not divide the model's 8 experts"),
        ({"tensor": 2}, {"num_moe_experts": 8}, "needs --sequence-parallel with it"),
        ({"context": 2}, {"experimental_attention_variant": "gated_delta_net"}, "cannot cut gated_delta_net"),
    ],
)
def test_models_that_do_not_fit(sizes: dict[str, Any], transformer: dict[str, Any], message: str) -> None:
    model = {"num_attention_heads": 4, "num_query_groups": 2, **transformer}
    with pytest.raises(ConfigError, match=message):
        Layout(**sizes).check_model(model)
