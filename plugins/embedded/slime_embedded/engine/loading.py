"""Parts that `EmbeddedEngine` loads on demand: an `EngineCore` with model and tokenizer, and an HTTP server."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from slime_core.data.tokenizer import has_tokenizer, load_tokenizer
from slime_core.distributions import BUNDLE, entry_points
from slime_core.errors import ConfigError, EngineError
from slime_core.models.config import ModelConfig
from slime_core.models.hf_io import read_weights
from slime_core.protocols import Args
from slime_embedded import kernels
from slime_embedded.engine.core import CoreOptions, EngineCore
from slime_embedded.hf.config import model_config
from slime_embedded.hf.model import TransformersModel

if TYPE_CHECKING:
    from slime_embedded.engine.engine import EmbeddedEngine

ServeFn: TypeAlias = "Callable[[EmbeddedEngine, str, int], Awaitable[tuple[str, int, Callable[[], Awaitable[None]]]]]"
"""(engine, host, port) -> host and port of the server, and a function that stops it."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_core(args: Args) -> EngineCore:
    """Read config, tokenizer and weights of `args.hf_checkpoint`. Raises ConfigError or WeightSyncError."""
    directory = Path(args.hf_checkpoint)
    kernels.use(args.kernels)
    for flag in ("num_threads", "engine_max_context_len"):
        if (number := getattr(args, flag)) is not None and number < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} {number}: must be at least 1")
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    config = model_config(directory, args.model_impl)
    if config.images:
        raise ConfigError(
            f"{directory}: a {config.model_type} model takes images, and the embedded engine generates with text models"
            " only; type --rollout-engine sglang or --rollout-engine http"
        )
    device = choose_device(args.device)
    tokenizer = load_tokenizer(directory) if has_tokenizer(directory) else None
    options = CoreOptions(
        max_running=args.engine_max_running_requests,
        max_tokens=args.engine_max_tokens,
        max_context=args.engine_max_context_len,
        batch_invariant=args.true_on_policy_mode,
        prefix_cache=args.engine_prefix_cache,
        sampling_mask=args.use_sampling_mask,
        seed=args.rollout_seed,
    )
    dtype = choose_dtype(args, device)
    if options.batch_invariant and dtype != torch.float32:
        raise ConfigError(f"--true-on-policy-mode needs --dtype float32; the engine would compute in {dtype}")
    model = None
    if config.build is not None:
        refused = {
            "--true-on-policy-mode": options.batch_invariant,
            "--use-rollout-routing-replay": args.use_rollout_routing_replay,
            "--lora-adapters": args.lora_adapters,
        }
        for flag in (flag for flag, given in refused.items() if given):
            raise ConfigError(
                f"{directory}: transformers builds this {config.model_type} model, for which the embedded engine has no"
                f" {flag}; remove it"
            )
        model = TransformersModel.from_directory(config, str(directory), device, dtype=dtype)
    weights: Iterable[tuple[str, torch.Tensor]] = () if model is not None else read_weights(directory)
    if args.lora_adapters:
        from slime_embedded.engine.adapters import stored

        weights = chain(weights, stored(directory, args.lora_adapters))
    return EngineCore(
        config,
        weights,
        tokenizer=tokenizer,
        eos_ids=eos_ids(directory, config, tokenizer),
        device=device,
        dtype=dtype,
        options=options,
        origin=str(directory),
        model=model,
        adapters=args.lora_adapters,
    )


def choose_device(name: str) -> torch.device:
    """Return the device for `--device`; "auto" is CUDA if available. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch sees no CUDA device here; use --device cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: allowed are auto, cpu, cuda and cuda:N") from error


def choose_dtype(args: Args, device: torch.device) -> torch.dtype:
    """Return the dtype for `--dtype` or `--bf16`; "auto" is bfloat16 on CUDA and float32 on CPU."""
    if args.dtype == "auto":
        half = args.bf16 or device.type == "cuda"
        return torch.bfloat16 if half else torch.float32
    return _DTYPES[args.dtype]


def eos_ids(directory: Path, config: ModelConfig, tokenizer: Any) -> set[int]:
    """Return all end-of-sequence ids of config.json, generation_config.json and the tokenizer, like SGLang."""
    found = set(config.eos_token_ids)
    path = directory / "generation_config.json"
    if path.is_file():
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        found |= set(value) if isinstance(value, list) else ({value} if value is not None else set())
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return {int(i) for i in found}


def http_server() -> ServeFn:
    """Return the HTTP serve function of an installed distribution. Raises EngineError if none is installed."""
    for _, entry, _ in entry_points("slime.http_servers"):
        serve: ServeFn = entry.load()
        return serve
    raise EngineError(
        "a generate or rollout function without the parameter context asks its engine over HTTP, and nothing installed"
        f" serves the embedded engine; type: pip install {BUNDLE}, or give the function the parameter context"
    )
