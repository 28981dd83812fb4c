"""Fixtures of the engine tests: tiny random HF models on disk, and the HF model to compare with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {"head_dim": 16}),
}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """(variant, seed, **config) -> (directory, HF model in float32, eval mode); every parameter random."""

    def make(variant: str = "qwen3", seed: int = 0, **overrides: Any) -> tuple[Path, Any]:
        import transformers

        family, switches = VARIANTS[variant]
        settings = {
            "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
            "initializer_range": 0.1, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2,
        } | switches | overrides  # fmt: skip
        torch.manual_seed(seed)
        config = getattr(transformers, f"{family}Config")(**settings)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        directory = tmp_path_factory.mktemp(variant)
        model.save_pretrained(directory)
        return directory, model

    return make


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of one token per byte (ids 3..258) and `<|pad|> <|end|> <|user|>` (ids 0..2)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|pad|>", "<|end|>", "<|user|>"]
    vocab = {token: i for i, token in enumerate(specials + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    fast.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'broken' %}{{ raise_exception('no such role') }}{% endif %}"
        "<|user|>{{ m['content'] }}{% endfor %}"
    )
    directory = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def make_text_model(
    make_model: Callable[..., tuple[Path, Any]], byte_tokenizer: Path
) -> Callable[..., tuple[Path, Any]]:
    """`make_model` with a vocabulary of bytes, and the tokenizer beside the weights."""

    def make(variant: str = "qwen3", seed: int = 0, **overrides: Any) -> tuple[Path, Any]:
        directory, model = make_model(variant, seed, vocab_size=259, **overrides)
        for path in byte_tokenizer.iterdir():
            (directory / path.name).write_bytes(path.read_bytes())
        return directory, model

    return make
