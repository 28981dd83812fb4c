from __future__ import annotations

from pathlib import Path

import torch
from slime_commands.init.tiny_model import write_random_model


def test_transformers_opens_the_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    parameters = write_random_model(tmp_path, seed=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert sum(p.numel() for p in model.parameters()) == parameters == 330_496
    assert model.config.eos_token_id == 1
    assert abs(model.model.embed_tokens.weight.std().item() - 0.05) < 0.002
    assert torch.isfinite(model(torch.tensor([[3, 26, 30]])).logits).all()


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random_model(tmp_path / name, seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c
