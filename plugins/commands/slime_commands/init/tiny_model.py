"""A tiny model: a random Qwen3-layout decoder of 330,496 parameters, as an HF directory.

Its tokenizer is byte-level BPE of 272 tokens with a chat template; the merges are written down here. The quick start
warms it up, contract suites and checks of components run with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime_embedded.models.decoder import init_weights

from slime_core.models.config import load_model_config
from slime_core.models.hf_io import write_config, write_weights


def hf_config(vocab_size: int) -> dict[str, Any]:
    """`config.json`."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "use_cache": True,
        "eos_token_id": SPECIAL_TOKENS.index(END),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "bos_token_id": None,
        "dtype": "float32",
    }


def write_random_model(directory: Path, seed: int) -> int:
    """Write tokenizer, configuration and random weights; the number of parameters."""
    write_config(directory, hf_config(write_tokenizer(directory)))
    weights = init_weights(load_model_config(directory), seed)
    write_weights(directory, weights.items())
    return sum(tensor.numel() for tensor in weights.values())


PAD, END = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<tool>", "</tool>")
# Digits never merge with anything: a number is always its digits, which is what the task is about.
_FIXED_WORDS = (r"\boxed{", r" \boxed{", "=?")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_tokenizer(directory: Path) -> int:
    """Write the files `transformers.AutoTokenizer` reads; the number of tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab, merges = _vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return int(tokenizer.get_vocab_size())


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Special tokens first, then the 256 bytes, then one token per merge."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for word in _FIXED_WORDS:
        text = word.replace(" ", "\u0120")  # the byte-level spelling of a space
        # " \boxed{" is one merge on top of "\boxed{".
        parts = [text[0], text[1:]] if text[1:] in tokens else list(text)
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            parts[:2] = [parts[0] + parts[1]]
            tokens.append(parts[0])
    return {token: number for number, token in enumerate(tokens)}, merges
