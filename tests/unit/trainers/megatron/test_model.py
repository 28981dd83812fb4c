"""Models of one process: the same logits as transformers, packed or not; heads, vocabularies and users' own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from slime_trainer_megatron.arguments.config import transformer_config
from slime_trainer_megatron.cpu_mode import on_device
from slime_trainer_megatron.layout import Layout
from slime_trainer_megatron.model.build import ValueHead, build_model
from slime_trainer_megatron.model.specs import block_spec
from slime_trainer_megatron.process_groups import ProcessGroups
from slime_trainer_megatron.weights.weights_in import load_hf

from slime_core.config import Args
from slime_core.errors import ConfigError
from tests.megatron_models import family, save_tiny

CPU = torch.device("cpu")
LENGTHS = [7, 1, 12, 4]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def built(directory: Path, role: Any = "actor", provider: Any = None, **flags: Any) -> tuple[Any, Any, Any]:
    args, model = Args(hf_checkpoint=str(directory), **flags), family(directory)
    config = transformer_config(args, model.architecture, Layout(), role=role, device=CPU)
    [chunk] = build_model(args, model, config, Layout(), role=role, provider=provider)
    return chunk, model, config


def sequences(vocab_size: int = 61) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]


def forward(chunk: Any, ids: list[torch.Tensor]) -> torch.Tensor:
    """[tokens, ...] of sequences packed end to end."""
    lengths = [len(sequence) for sequence in ids]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    params = PackedSeqParams("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest)
    positions = torch.cat([torch.arange(length) for length in lengths])
    with on_device(CPU):
        out: torch.Tensor = chunk(torch.cat(ids)[None], positions[None], None, packed_seq_params=params)
    return out[0]


@pytest.mark.parametrize(
    ("variant", "config"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama-biases", {}),
        ("qwen2-tied", {}),
        ("qwen3", {}),
        ("qwen3-moe", {}),
        ("qwen3-moe-mixed", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_packed_logits_are_those_of_transformers(
    groups: ProcessGroups, tmp_path: Path, variant: str, config: dict[str, Any]
) -> None:
    reference = save_tiny(tmp_path, variant, **config)
    chunk, model, _ = built(tmp_path)
    load_hf([chunk], model, tmp_path)
    ids = sequences()
    with torch.no_grad():
        expected = torch.cat([reference(sequence[None]).logits[0] for sequence in ids])
        torch.testing.assert_close(forward(chunk, ids), expected, rtol=0, atol=1e-5)
        with on_device(CPU):
            alone = chunk(ids[2][None], torch.arange(LENGTHS[2])[None], None)[0]
        torch.testing.assert_close(alone, expected.split(LENGTHS)[2], rtol=0, atol=1e-5)


def test_a_critic_gives_one_value_per_token(groups: ProcessGroups, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2-tied")
    chunk, _, _ = built(tmp_path, role="critic")
    ids = sequences()
    values = forward(chunk, ids)
    assert torch.equal(values, torch.zeros(sum(LENGTHS), 1))
    values.sum().backward()
    assert chunk.output_layer.weight.grad.abs().sum() > 0
    with torch.no_grad():
        chunk.output_layer.weight.fill_(0.1)
        chunk.output_layer.bias.fill_(2.0)
    values = forward(chunk, ids)
    assert values.dtype == torch.float32
    assert values.std() > 0
    torch.testing.assert_close(forward(chunk, ids[2:3]), values.split(LENGTHS)[2])


def test_a_users_own_model_is_taken(groups: ProcessGroups, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    _, model, config = built(tmp_path)
    asked = []

    def provider(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> GPTModel:
        asked.append((pre_process, post_process, vp_stage))
        with on_device(CPU):
            block = block_spec(config, model, device=CPU, vp_stage=vp_stage)
            return GPTModel(config, block, 61, 64, pre_process, post_process, position_embedding_type="rope")

    chunk, _, _ = built(tmp_path, provider=provider)
    assert asked == [(True, True, None)]
    assert chunk.unpadded_vocab_size == 61
    assert isinstance(built(tmp_path, role="critic", provider=provider)[0].output_layer, ValueHead)
    with pytest.raises(ConfigError, match=r"--custom-model-provider-path: .* returned NoneType"):
        built(tmp_path, provider=lambda pre_process, post_process: None)
