from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from slime_embedded.models.decoder import Decoder
from slime_models.qwen3_moe import model

from slime_core.errors import ConfigError
from slime_core.models.config import load_model_config
from slime_core.models.hf_io import copy_assets, read_weights, write_weights

HF = {
    "model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory that transformers wrote, and its model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    settings = {k: v for k, v in HF.items() if k != "model_type"}
    config = Qwen3MoeConfig(**settings, norm_topk_prob=True, initializer_range=0.2, mlp_only_layers=[1])
    reference = Qwen3MoeForCausalLM(config).eval()
    directory = tmp_path_factory.mktemp("qwen3-moe")
    reference.save_pretrained(directory)
    return directory, reference


def our_decoder(directory: Path) -> Decoder:
    return Decoder.from_weights(load_model_config(directory), read_weights(directory))


def test_logits_and_gradients_are_transformers(saved: tuple[Path, Any], tmp_path: Path) -> None:
    directory, reference = saved
    decoder = our_decoder(directory)
    ids = torch.randint(0, 61, (1, 40), generator=torch.Generator().manual_seed(1))
    expected, found = reference(ids).logits[0], decoder(ids[0], [40])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    expected.backward(grad)
    found.backward(grad)
    # Their gradients under the names of the files: a model whose weights are those gradients, saved.
    from transformers import Qwen3MoeForCausalLM

    of_gradients = Qwen3MoeForCausalLM(reference.config)
    theirs = dict(reference.named_parameters())
    with torch.no_grad():
        for name, parameter in of_gradients.named_parameters():
            parameter.copy_(theirs[name].grad)
    reference.zero_grad()
    of_gradients.save_pretrained(tmp_path)
    gradients = dict(read_weights(tmp_path))
    for name, parameter in decoder.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad  # an expert nobody chose
        torch.testing.assert_close(grad, gradients[name], rtol=1e-4, atol=1e-4, msg=name)


def test_what_we_write_transformers_reads_bit_for_bit(saved: tuple[Path, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory, reference = saved
    decoder = our_decoder(directory)
    copy_assets(directory, tmp_path)
    write_weights(tmp_path, decoder.state_dict().items())
    back = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    for name, parameter in reference.named_parameters():
        assert torch.equal(parameter, back[name]), name
    written, original = dict(read_weights(tmp_path)), dict(read_weights(directory))
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in written)


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({}, (0, 1, 2)),
        ({"decoder_sparse_step": 2}, (1,)),
        ({"mlp_only_layers": [0, 2]}, (1,)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [1]}, (2,)),
    ],
)
def test_which_layers_have_experts(change: dict[str, Any], layers: tuple[int, ...]) -> None:
    config = model({**HF, **change})
    assert config.moe is not None
    assert config.moe.layers == layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 of 6 experts; allowed: 1 to 6"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model({**HF, **change})
