"""Check that a GPU and every kernel that a run would use on it work; exit with status 1 and list the missing parts.

    .venv/bin/python benchmarks/accelerator.py [--without megatron]

Each kernel does one small piece of work and is compared with float32 on the CPU, so one that is there and wrong is
found, too. `make benchmarks DEVICE=cuda` begins with it: no number is printed for a run that fell back on something
else.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import torch
from _harness import Parser, table

CLOSE = 0.05
"""Tolerance of bfloat16 results with inputs of about 1."""


def device() -> str:
    """Return a description of the GPUs. Raises RuntimeError without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no GPU: install a CUDA build of torch, look at nvidia-smi")
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"


def bfloat16() -> str:
    """Check a bfloat16 matrix product."""
    a, b = torch.randn(256, 256), torch.randn(256, 256) / 16
    agrees((a.cuda().bfloat16() @ b.cuda().bfloat16()).float().cpu(), a @ b)
    return "products of matrices"


def attention() -> str:
    """Check torch's flash attention, without its fallbacks."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = torch.randn(3, 1, 4, 128, 64)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = scaled_dot_product_attention(*(x.cuda().bfloat16() for x in (q, k, v)), is_causal=True)
    agrees(found.float().cpu(), scaled_dot_product_attention(q, k, v, is_causal=True))
    return "flash, by torch"


def nccl() -> str:
    """Check an NCCL sum over this one process."""
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        one = torch.ones(1, device="cuda")
        dist.all_reduce(one)
        agrees(one.cpu(), torch.ones(1))
    finally:
        dist.destroy_process_group()
    return ".".join(map(str, torch.cuda.nccl.version()))


def megatron() -> str:
    """Check megatron-core with Transformer Engine, whose layers it uses on a GPU."""
    core, engine = (importlib.import_module(name) for name in ("megatron.core", "transformer_engine"))
    importlib.import_module("transformer_engine.pytorch")
    return f"megatron-core {core.__version__}, Transformer Engine {engine.__version__}"


def agrees(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare two tensors. Raises RuntimeError if they differ."""
    gap = float((found - wanted).abs().max())
    if not gap <= CLOSE:
        raise RuntimeError(f"gives other numbers than float32 on the CPU: {gap:.3g} apart")


NEEDED: dict[str, Callable[[], str]] = {
    "device": device,
    "bfloat16": bfloat16,
    "attention": attention,
    "nccl": nccl,
    "megatron": megatron,
}


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--without", nargs="+", choices=sorted(NEEDED), default=[], help="what you will not measure")
    options = parser.parse_args()
    found, missing = [], []
    for name in (name for name in NEEDED if name not in options.without):
        try:
            found.append([name, NEEDED[name]()])
        except (ImportError, RuntimeError, AssertionError, OSError) as error:
            missing.append(f"{name}: {str(error).splitlines()[0]}")
            if name == "device":
                break
    if found:
        print(table(["what", "found"], found))
    for line in missing:
        print(f"missing: {line}", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
