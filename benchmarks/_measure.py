"""Measurements shared by benchmark scripts: peak memory, the FLOPs of a model, a device's own speed.

Imported by `trainer.py`, `trainers.py` and `engine.py`. FLOPs are counted as in `slime_core.models.family`: two per
weight and token, causal attention at half the square, nothing for norms, rotation and the optimizer. A training step
counts as three forward passes, whether or not activations are recomputed. "Utilisation" is FLOPs / seconds / peak. The
peak is the measured speed of the fastest matrix product, or the value of `--peak-tflops` (the data sheet's number, on a
GPU).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from slime_embedded.engine.linear import packed_kernel_works

from slime_core.models.family import DecoderShape


class PeakMemory:
    """Peak memory within the block in MiB, of the GPU if there is one, else of the process (Linux only).

    `mib` is the growth since the beginning, `total` the peak, and `before` the memory at the beginning.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._cuda = device.startswith("cuda")

    def __enter__(self) -> PeakMemory:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")
        self.before = resident(self._cuda)
        return self

    def __exit__(self, *_: object) -> None:
        self.total = torch.cuda.max_memory_allocated() / 2**20 if self._cuda else _status("VmHWM")
        self.mib = self.total - self.before


def resident(cuda: bool = False) -> float:
    """Return the memory in use now, in MiB."""
    return torch.cuda.memory_allocated() / 2**20 if cuda else _status("VmRSS")


def _status(key: str) -> float:
    line = next(ln for ln in Path("/proc/self/status").read_text().splitlines() if ln.startswith(key + ":"))
    return int(line.split()[1]) / 1024


def wait_for(device: str) -> None:
    """Wait until all submitted work of the device is done; call before reading a clock."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def shape_of(hf: Mapping[str, Any]) -> DecoderShape:
    """Return the shape of a dense model from the entries of its `config.json`."""
    heads = hf["num_attention_heads"]
    return DecoderShape(
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        vocab_size=hf["vocab_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads", heads),
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
    )


def step_flops(hf: Mapping[str, Any], lengths: Sequence[int]) -> int:
    """Return the FLOPs of forward and backward over sequences of these lengths, the output layer for every token."""
    shape = shape_of(hf)
    return 3 * sum(shape.forward_flops(length) for length in lengths)


def decode_flops(hf: Mapping[str, Any], prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> int:
    """Return the least FLOPs of generating `outputs` tokens after prompts of these ids.

    Equal prompts are computed once. The last layer needs only keys and values of a prompt but for its last token, only
    tokens that predict one pass the output layer, and the last output is not computed further.
    """
    shape = shape_of(hf)
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    token = 2 * shape.hidden_size * (2 * query + 2 * key_value + 3 * shape.intermediate_size)
    head, pair = 2 * shape.hidden_size * shape.vocab_size, 4 * query
    total = 0
    for length in map(len, {tuple(prompt) for prompt in prompts}):
        total += (shape.num_layers - 1) * (length * token + pair * length * (length + 1) // 2)
        total += (length - 1) * 4 * shape.hidden_size * key_value + token + pair * length + head
    for length, output in zip(map(len, prompts), outputs, strict=True):
        seen = sum(range(length + 1, length + output))
        total += (output - 1) * (shape.num_layers * token + head) + shape.num_layers * pair * seen
    return total


def matmul_flops_per_second(device: str, dtype: torch.dtype, *, seconds: float = 1.0) -> float:
    """Return the best speed of matrix products; on CPU per second of processor time of the set threads.

    On CPU small matrices, which stay in the caches, and packed weights, which some processors multiply faster, count,
    too: a bound has to be the fastest product of all.
    """
    on_gpu = device.startswith("cuda")
    sizes = (8192,) if on_gpu else (128, 256, 512, 1024)
    clock = time.perf_counter if on_gpu else time.process_time
    products = [product for size in sizes for product in _products(size, device, dtype)]
    best = 0.0
    for size, product in products:
        until = time.monotonic() + seconds / len(products)
        runs = max(1, 1024**3 // size**3) if not on_gpu else 1  # a clock is too coarse for one small product
        while True:
            wait_for(device)
            started = clock()
            for _ in range(runs):
                product()
            wait_for(device)
            best = max(best, 2 * size**3 * runs / (clock() - started))
            if time.monotonic() >= until:
                break
    return best


def _products(size: int, device: str, dtype: torch.dtype) -> Iterator[tuple[int, Callable[[], object]]]:
    """Yield (size, function) of square products: by `mm`, and on CPU with oneDNN's packed weights if torch has them."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    yield size, lambda: torch.mm(a, b)
    if not device.startswith("cuda") and packed_kernel_works(dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(b, size)
        yield size, lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], "")
