"""A tiny Qwen3-layout model on disk, and batches for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_embedded.models.decoder import init_weights

from slime_core.config import Args
from slime_core.models.config import ModelConfig
from slime_core.models.hf_io import write_config, write_weights
from slime_core.sample import TrainBatch
from tests.batches import train_batch

torch.set_num_threads(1)

VOCAB = 61
HF: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
    "eos_token_id": 1,
}


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Write an HF-layout directory, with changes to its config."""

    def make(name: str = "model", seed: int = 0, **changes: Any) -> Path:
        hf, directory = {**HF, **changes}, tmp_path / name
        write_weights(directory, init_weights(ModelConfig.from_hf(hf, qk_norm=True), seed=seed).items())
        write_config(directory, hf)
        return directory

    return make


@pytest.fixture
def model_dir(make_model: Callable[..., Path]) -> Path:
    """An HF-layout directory."""
    return make_model()


@pytest.fixture
def make_args(model_dir: Path) -> Callable[..., Args]:
    """Arguments for the model, with overrides."""

    def make(**overrides: Any) -> Args:
        defaults = {"hf_checkpoint": str(model_dir), "device": "cpu", "lr": 1e-2, "lr_decay_style": "constant"}
        return Args(**{**defaults, **overrides})

    return make


@pytest.fixture
def make_batch() -> Callable[..., TrainBatch]:
    """Random samples; a reward in [-1, 1] stands in for the advantage."""

    def make(count: int = 8, seed: int = 0, rollout_id: int = 0) -> TrainBatch:
        rng = random.Random(seed)
        lengths = [(rng.randint(1, 6), rng.randint(1, 20)) for _ in range(count)]
        responses = [response for _, response in lengths]
        rewards = [rng.uniform(-1, 1) for _ in range(count)]
        tokens = [[rng.randrange(VOCAB) for _ in range(prompt + response)] for prompt, response in lengths]
        columns = {"rollout_id": rollout_id, "tokens": tokens, "rewards": rewards}
        return train_batch([[1] * n for n in responses], **columns, group_indices=[i // 4 for i in range(count)])

    return make
