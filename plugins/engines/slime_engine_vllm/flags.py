"""The flags --vllm-*, and which of vLLM's flags a server gets.

The list is slime's own: importing vLLM takes seconds. The tests compare it with the installed version's parser.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_core.config import ForeignFlags
from slime_core.config.flag_parser import FlagParser, Switch, as_json
from slime_core.config.spec import flag_specs
from slime_core.protocols import Args

OWNER = "vllm_"
"""Prefix of the attributes on `args`; the rest of the name is the name of vLLM's flag."""
FLAGS: Mapping[str, tuple[Any, str]] = {
    "dtype": (None, "Data type of weights and activations; float32 on CPU."),
    "max_model_len": (int, "Context length; by default the model's."),
    "gpu_memory_utilization": (float, "Share of the GPU's memory that a server may take."),
    "kv_cache_memory_bytes": (int, "Bytes of the key-value cache of each GPU."),
    "kv_cache_dtype": (None, "Data type of the key-value cache."),
    "block_size": (int, "Tokens of a block of the key-value cache."),
    "max_num_seqs": (int, "Most requests of a batch."),
    "max_num_batched_tokens": (int, "Most tokens of a batch."),
    "pipeline_parallel_size": (int, "Pipeline stages of a server."),
    "quantization": (None, "Quantisation method."),
    "load_format": (None, "Format of the weights to load."),
    "attention_backend": (None, "Attention backend."),
    "stream_interval": (int, "Tokens between two events of a stream."),
    "compilation_config": (as_json, "Settings of torch.compile."),
    "speculative_config": (as_json, "Settings of speculative decoding."),
    "hf_overrides": (as_json, "Entries that replace the model's config.json."),
    "enforce_eager": (bool, "Run without CUDA graphs and torch.compile; always set on CPU."),
    "enable_prefix_caching": (bool, "Reuse keys and values of common prefixes."),
    "enable_chunked_prefill": (bool, "Split long prompts over several batches."),
    "enable_expert_parallel": (bool, "Distribute the experts of a mixture instead of splitting each."),
    "async_scheduling": (bool, "Schedule a batch while the last one runs."),
    "trust_remote_code": (bool, "Run Python code that comes with the model."),
}
"""Name -> type of the value (`bool`: a switch) and help."""


def server_flags() -> ForeignFlags:
    """Return vLLM's flags."""
    return ForeignFlags(
        "vLLM",
        lambda _: parser(),
        prefixes=("vllm-", "no-vllm-"),
        used_by=("vllm",),
        help_flag="help-vllm",
        examples=("vllm-max-model-len", "vllm-gpu-memory-utilization"),
    )


def parser() -> FlagParser:
    """Return a parser of all flags."""
    flags = FlagParser("vLLM's server (slime's list)")
    for name, (kind, told) in FLAGS.items():
        word = name.replace("_", "-")
        shape = {"action": Switch, "off": (f"--no-vllm-{word}",)} if kind is bool else {"type": kind}
        flags.add_argument(f"--vllm-{word}", dest=OWNER + name, help=told, **shape)
    return flags


def given_flags(args: Args) -> dict[str, Any]:
    """Return name -> value of the flags that were given; vLLM's parser checks values that are words."""
    own = {**vars(args), **(args.model_extra or {})}
    names = [name for name in own if name.startswith(OWNER) and name not in flag_specs() and own[name] is not None]
    listed = parser()
    return {name.removeprefix(OWNER): listed.read(name, own[name], f"args.{name}")[1] for name in names}
