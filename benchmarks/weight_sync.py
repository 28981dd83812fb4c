"""Weight updates: seconds and bytes of each transport against a copy of the same bytes in memory.

    .venv/bin/python benchmarks/weight_sync.py [--millions 1 10 100] [--repeat 5] [--engine-python VENV/bin/python]

Random Qwen3-shaped weights in float32 (or `--dtype bfloat16`), on CPU or, with `--device cuda`, in a GPU's memory. The
embedded engine takes them in this process (tensor) and from files (disk); with --engine-python one SGLang server on
the same device takes them by every transport of full weights, 64 MiB at a time. Each transport takes turns with the
copy, `torch.Tensor.copy_` of all weights into memory that is already there; the last columns are medians, the update's
rate and the ratio. The floor of the embedded engine in float32 on CPU is what its functions in C cannot do without: the
matrices transposed into memory that is there, by one call each. Deltas have a script of their own, weight_delta.py.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _harness import Parser, ratio, spread, table
from _measure import wait_for
from slime_commands.init.tiny_model import write_random_model
from slime_embedded.kernels import load, pointers

from slime_core.config import load_settings
from slime_core.models.hf_io import copy_assets, write_weights

Weights = dict[str, torch.Tensor]
Update = Callable[[Weights, int], Awaitable[object]]
HEADER = ("engine", "transport", "parameters", "MiB", "copy s", "update s", "noise", "GB/s", "update / copy")


def build(folder: Path, millions: float, dtype: torch.dtype, device: str) -> Weights:
    """Build a model directory of about `millions` million parameters, and return it with its weights on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_random_model(folder, seed=0)
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers, config.head_dim = 4, 64
    config.num_attention_heads = config.num_key_value_heads = 4
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        config.layer_types = layer_types[:1] * config.num_hidden_layers
    width = max(64, int((millions * 1e6 / config.num_hidden_layers / 12) ** 0.5) // 64 * 64)
    config.hidden_size, config.intermediate_size = width, 3 * width
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    model.save_pretrained(folder)
    tied = config.tie_word_embeddings
    return {n: p.detach().to(device) for n, p in model.named_parameters() if not (tied and n == "lm_head.weight")}


async def measure(weights: Weights, update: Update, repeat: int, first_version: int) -> tuple[list[float], list[float]]:
    """Measure the seconds of copies and updates in turns; the first of each is not counted."""
    room = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    copies, updates = [], []
    for turn in range(repeat + 1):
        began = time.perf_counter()
        for name, tensor in weights.items():
            room[name].copy_(tensor)
        wait_for(next(iter(room.values())).device.type)
        copied = time.perf_counter()
        await update(weights, first_version + turn)
        wait_for(next(iter(room.values())).device.type)
        ended = time.perf_counter()
        if turn:
            copies.append(copied - began)
            updates.append(ended - copied)
    return copies, updates


def transposition(weights: Weights, repeat: int) -> float | None:
    """Return the median seconds to reorder only the matrices for multiplication in C; None if C takes no matrix."""
    kernels = load("decode")
    if kernels is None or any(x.dtype != torch.float32 or x.device.type != "cpu" for x in weights.values()):
        return None
    pairs = [(x, x.new_zeros(-(-len(x) // 64), x.shape[1], 64)) for x in weights.values() if x.dim() == 2]
    found = []
    for _ in range(repeat + 1):
        began = time.perf_counter()
        for matrix, tiles in pairs:
            kernels.pack(*matrix.shape, *pointers(matrix, tiles), 0, 0)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def by_files(engine: Any, model: Path, folder: Path) -> Update:
    """Write the directory and let the engine load it, as `--update-weight-transport disk` does."""

    async def update(weights: Weights, version: int) -> None:
        directory = folder / f"v{version}"
        copy_assets(model, directory)
        write_weights(directory, weights.items())
        await engine.update_weights_from_disk(directory, version)
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()

    return update


def transports(engine: Any, model: Path, folder: Path) -> dict[str, Update]:
    """Return the update functions for full weights that this engine supports, by transport."""
    ways: dict[str, Update] = {}
    if "tensor" in engine.weight_transports:
        ways["tensor"] = lambda weights, version: engine.update_weights_from_tensor(weights.items(), version)
    if "distributed" in engine.weight_transports:
        ways["distributed"] = lambda weights, version: engine.update_weights_from_distributed(weights.items(), version)
    ways["disk"] = by_files(engine, model, folder)
    return ways


def make_engine(name: str, model: Path, folder: Path, options: Any) -> Any:
    """Return an engine that is not started yet."""
    argv = ["--hf-checkpoint", str(model), "--rollout-engine", name, "--save", str(folder / "run")]
    argv += ["--update-weight-buffer-size", str(64 * 1024**2), "--dtype", options.dtype, "--device", options.device]
    if name == "sglang":
        argv += ["--engine-python", str(options.engine_python), "--no-engine-router", "--rollout-num-gpus", "1"]
    args = load_settings(argv, command="serve", env={}).args
    args.run_dir = str(folder / "run")
    if name == "sglang":
        from slime_engine_sglang.engine import SglangEngine

        return SglangEngine(args)
    from slime_embedded.engine.engine import EmbeddedEngine

    return EmbeddedEngine(args)


async def rows(name: str, millions: float, options: Any) -> list[tuple[str, ...]]:
    """Return the table's rows for one engine and size."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        weights = build(folder / "model", millions, getattr(torch, options.dtype), options.device)
        count = sum(tensor.numel() for tensor in weights.values())
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        engine = make_engine(name, folder / "model", folder, options)
        await engine.start()
        try:
            found, floor = [], transposition(weights, options.repeat) if name == "embedded" else None
            for number, (transport, update) in enumerate(transports(engine, folder / "model", folder).items()):
                copies, updates = await measure(weights, update, options.repeat, 1 + 1000 * number)
                copy, pushed = statistics.median(copies), statistics.median(updates)
                what = f"weight update, {name}, {transport}, {count / 1e6:.1f}M, copy / update"
                ratio(what, updates, copies, floor=floor, aim=0.67)
                found.append((
                    name, transport, f"{count / 1e6:.1f}M", f"{nbytes / 2**20:.0f}", f"{copy:.4f}", f"{pushed:.4f}",
                    spread(updates), f"{nbytes / pushed / 1e9:.2f}", f"{pushed / copy:.1f}",
                ))  # fmt: skip
            return found
        finally:
            await engine.stop()


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 10, 100], help="parameters, in millions")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--engine-python", help="interpreter of SGLang's environment; without, only the embedded engine"
    )
    options: SimpleNamespace = parser.parse_args(argv, namespace=SimpleNamespace())
    torch.set_num_threads(1)
    names = ("embedded", "sglang") if options.engine_python else ("embedded",)
    found = [
        row for millions in options.millions for name in names for row in asyncio.run(rows(name, millions, options))
    ]
    print(table(HEADER, found))


if __name__ == "__main__":
    main()
