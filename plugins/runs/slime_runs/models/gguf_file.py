"""Write a decoder of the families llama, qwen2 and qwen3 with its tokenizer as a GGUF file, by the package `gguf`.

Names, the order of rows in Llama's queries and keys, and the metadata are llama.cpp's (gguf-py's constants and
tensor map; convert_hf_to_gguf.py for the permutation and the frequency factors of Llama 3's rotary positions).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from slime_embedded.models.rope import rope_frequencies

from slime_core.errors import ConfigError
from slime_core.models.config import ModelConfig
from slime_runs.models.commit import Commit

FAMILIES = ("llama", "qwen2", "qwen3")
_DEFAULT_PRE = "default"
_EXACT = ("qwen2", "llama-bpe", "gpt-2")
"""Pre-tokenizers that transformers' reader knows, so that the ids must be equal."""
_TEXTS = (
    "Hello, world! It's 12345 + 67 = 12412.",
    "def f(x):\n    return x ** 2\n",
    "na\u00efve caf\u00e9 \u4f60\u597d  two  spaces",
)


def write(path: Path, commit: Commit, dtype: torch.dtype) -> tuple[str, ...]:
    """Write the file; return notes on what readers may do differently.

    Raises:
        ConfigError: The family, the rotary positions, a bias or the tokenizer has no form in such a file.
    """
    config = commit.config
    _check(config)
    writer = gguf.GGUFWriter(str(path), config.model_type)
    writer.add_name(commit.run.name)
    _add_numbers(writer, config)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if dtype == torch.float16 else gguf.LlamaFileType.ALL_F32)
    pre = _add_tokenizer(writer, commit.path, config)
    names = gguf.get_tensor_name_map(_architecture(config.model_type), config.num_layers)
    for name, tensor in commit.weights():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, f"{name} has no name in GGUF"
        values = _permuted(name, tensor.float(), config)
        half = dtype == torch.float16 and values.dim() > 1
        writer.add_tensor(target, (values.half() if half else values).contiguous().numpy())
    if (factors := _frequency_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _check_tokenizer(path, commit.path, pre)


def config_of(path: Path, commit: Commit) -> Any:
    """Return the configuration that transformers reads from the file, with the numbers that its reader leaves out.

    Raises:
        ConfigError: A number that the reader does take from the file is another than the model's.
    """
    import transformers

    read = transformers.AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    model = transformers.AutoConfig.from_pretrained(str(commit.path), local_files_only=True)
    compared = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    for name in (*compared, "vocab_size", "max_position_embeddings", "tie_word_embeddings", "eos_token_id"):
        if getattr(read, name) != _plain(getattr(model, name)):
            raise ConfigError(f"{path}: {name} reads as {getattr(read, name)}, and is {getattr(model, name)}")
    # The reader knows neither the width of heads nor scaled rotary positions; llama.cpp does.
    read.head_dim = commit.config.head_dim
    if commit.config.rope_scaling is not None:
        read.rope_parameters = model.rope_parameters
    return read


def _plain(value: Any) -> Any:
    """Return the first of several end tokens, which is the one in the file."""
    return value[0] if isinstance(value, list) else value


def _check(config: ModelConfig) -> None:
    if config.model_type not in FAMILIES:
        raise ConfigError(f"--format gguf: a {config.model_type} model; allowed: {', '.join(FAMILIES)}")
    if config.o_bias or config.mlp_bias or (config.qkv_bias and config.model_type != "qwen2"):
        raise ConfigError(f"--format gguf: a {config.model_type} model with biases; readers of GGUF ignore them")


def _architecture(model_type: str) -> Any:
    return next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == model_type)


def _add_numbers(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if _rope_kind(config) == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float((config.rope_scaling or {})["factor"]))


def _rope_kind(config: ModelConfig) -> str:
    scaling = config.rope_scaling or {}
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def _frequency_factors(config: ModelConfig) -> np.ndarray | None:
    """[head_dim / 2] divisors of the plain frequencies for Llama 3's rule; None for other rotary positions."""
    if _rope_kind(config) != "llama3":
        return None
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    found: np.ndarray = (1.0 / config.rope_theta**exponents / rope_frequencies(config)).numpy()
    return found


def _permuted(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Return the tensor, with the rows of Llama's queries and keys in the order of interleaved rotary pairs."""
    if config.model_type != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    heads = config.num_heads if "q_proj" in name else config.num_kv_heads
    rows = tensor.shape[0]
    return tensor.reshape(heads, 2, rows // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


# -- tokenizer --------------------------------------------------------------------------------------------------


def _add_tokenizer(writer: gguf.GGUFWriter, directory: Path, config: ModelConfig) -> str:
    """Add vocabulary, merges, special tokens and chat template; return the name of the pre-tokenizer."""
    from slime_core.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(directory)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    if content["model"]["type"] != "BPE" or "ByteLevel" not in json.dumps(content["decoder"]):
        raise ConfigError(
            f"--format gguf: the tokenizer is {content['model']['type']}; byte-level BPE is written, so type --format"
            " merged"
        )
    added = {entry["id"]: bool(entry["special"]) for entry in content["added_tokens"]}
    tokens, types = [], []
    known = {number: token for token, number in tokenizer.get_vocab().items()}
    for number in range(config.vocab_size):
        kind = gguf.TokenType.NORMAL if number in known else gguf.TokenType.UNUSED
        if number in added:
            kind = gguf.TokenType.CONTROL if added[number] else gguf.TokenType.USER_DEFINED
        tokens.append(known.get(number, f"[PAD{number}]"))
        types.append(kind)
    pre = _pre_tokenizer(content["pre_tokenizer"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = content["model"]["merges"]
    if not merges:  # readers then look for merges in the vocabulary, by scores
        writer.add_token_scores([0.0] * len(tokens))
    else:
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    eos = _plain(config.hf.get("eos_token_id"))
    ids = {"bos": config.hf.get("bos_token_id"), "eos": eos, "pad": config.hf.get("pad_token_id")}
    adders = {"bos": writer.add_bos_token_id, "eos": writer.add_eos_token_id, "pad": writer.add_pad_token_id}
    for name, number in ids.items():
        if number is not None:
            adders[name](number)
    writer.add_add_bos_token(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
    return pre


def _pre_tokenizer(content: Mapping[str, Any] | None) -> str:
    """Return llama.cpp's name of a way to cut text before merging."""
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    text = json.dumps(content)
    patterns = {PRETOKENIZE_REGEX: "qwen2", PRETOKENIZE_REGEX.replace(r"\p{N}|", r"\p{N}{1,3}|"): "llama-bpe"}
    for pattern, name in patterns.items():
        if json.dumps(pattern) in text:
            return name
    if '"Digits"' in text:
        return "smollm"
    return "gpt-2" if content and content.get("type") == "ByteLevel" and content.get("use_regex") else _DEFAULT_PRE


def _check_tokenizer(path: Path, directory: Path, pre: str) -> tuple[str, ...]:
    """Compare the ids of some texts by both tokenizers, as transformers reads them."""
    import transformers

    from slime_core.data.tokenizer import load_tokenizer

    ours = load_tokenizer(directory)
    read = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    if read.chat_template != ours.chat_template:
        raise ConfigError(f"{path}: its chat template reads differently")
    texts = [*_TEXTS, *ours.all_special_tokens]
    different = [t for t in texts if _ids(read, t) != _ids(ours, t)]
    if different and pre in _EXACT:
        raise ConfigError(f"{path}: its tokenizer gives other ids for {different[0]!r}")
    known = f"GGUF has no name for its pre-tokenizer (written as {pre!r})" if pre == _DEFAULT_PRE else f"as {pre!r}"
    return (
        (f"transformers' reader cuts {len(different)} of {len(texts)} texts otherwise: {known}",) if different else ()
    )


def _ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return found
