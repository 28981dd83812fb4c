"""Engine tokens per second against `transformers.generate`: same random model, same machine, same process.

    python benchmarks/engine.py --sizes 0.5M 2M 10M --dtypes float32 bfloat16 --concurrency 1 8 64 256

Two workloads. "equal": every sequence has the same prompt length and produces the same number of tokens. "mix":
groups of 8 samples of one prompt with log-normal output lengths; transformers generates the whole batch until the
longest is done, as its users do, and only wanted tokens count. Each figure is the best of `--repeat` runs. The sides
alternate, so that a busy machine affects both; `--clock cpu` counts processor seconds instead of wall time. The script
prints ratios; absolute numbers depend on the machine. "mfu" is model FLOP utilisation: the FLOPs that these tokens
cannot do without, divided by the time and by the speed of the fastest matrix product, measured in every turn (or
`--peak-tflops`). Peak memory is the GPU's, or that of this process, which runs both sides. `--impl transformers`
measures the engine over the class of transformers. For a GPU:

    python benchmarks/engine.py --device cuda --dtypes bfloat16 --sizes 0.6B --concurrency 1 64 256 --tokens 256
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from _harness import Parser, ratio
from _measure import PeakMemory, decode_flops, matmul_flops_per_second
from slime_embedded.engine.core import EngineCore
from slime_embedded.engine.loading import load_core

from slime_core.config import Args

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# size -> hidden, layers, heads, key/value heads, head_dim, intermediate
SIZES = {
    "0.3M": (128, 2, 4, 2, 32, 256),
    "0.5M": (128, 3, 4, 2, 32, 320),
    "2M": (256, 3, 8, 4, 32, 640),
    "10M": (384, 6, 8, 4, 48, 1024),
    "0.6B": (1024, 28, 16, 8, 128, 3072),
}
VOCAB = 512
VOCABS = {"0.6B": 151_936}
"""Vocabulary sizes of published shapes; prompts use the first `VOCAB` ids."""


@dataclass
class Row:
    workload: str
    size: str
    dtype: str
    concurrency: int
    ours: float
    hf: float
    mfu: float
    """Model FLOPs utilization of `ours`."""
    mib: float
    """Peak memory in MiB during `ours`."""


def build(size: str, directory: Path, context: int) -> int:
    """Write a random model of the size and return its parameters."""
    hidden, layers, heads, kv_heads, dim, inner = SIZES[size]
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABS.get(size, VOCAB), hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=dim, intermediate_size=inner, tie_word_embeddings=True,
        max_position_embeddings=context, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    return model.num_parameters()


def make_core(directory: Path, dtype: str, options: argparse.Namespace) -> EngineCore:
    args = Args(hf_checkpoint=str(directory), dtype=dtype, device=options.device, model_impl=options.impl)
    return load_core(args)


def run_ours(core: EngineCore, prompts: list[list[int]], lengths: list[int]) -> None:
    core.flush_cache()
    for i, (prompt, length) in enumerate(zip(prompts, lengths)):
        core.add_request(prompt, {"max_new_tokens": length, "ignore_eos": True, "sampling_seed": i}, f"r{i}")
    while core.has_work:
        core.step()


@torch.inference_mode()
def run_hf(model: Any, prompts: list[list[int]], lengths: list[int], device: str) -> None:
    ids = torch.tensor(prompts, device=device)
    longest = max(lengths)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=longest, min_new_tokens=longest,
    )  # fmt: skip
    assert out.shape[1] == ids.shape[1] + longest


def timed(run: Callable[[], None], options: argparse.Namespace) -> float:
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    start = clock()
    run()
    if options.device.startswith("cuda"):
        torch.cuda.synchronize()
    return clock() - start


def compare(
    pair: tuple[Callable[[], None], Callable[[], None]], dtype: str, options: argparse.Namespace
) -> tuple[float, float, float, float]:
    """Return the best seconds of each side, after one warm-up, the first side's peak MiB, and the best FLOP/s.

    Sides and products take turns, so that all of them are measured while the processor is fast.
    """
    best, peak = [math.inf, math.inf], 0.0
    with PeakMemory(options.device) as memory:
        pair[0]()
    pair[1]()
    for _ in range(options.repeat):
        for i, run in enumerate(pair):
            best[i] = min(best[i], timed(run, options))
        peak = max(peak, peak_flops(dtype, options))
    return best[0], best[1], memory.total, peak


def log_normal_lengths(n: int, mean: float, sigma: float, longest: int, seed: int = 0) -> list[int]:
    """Draw heavy-tailed lengths with the given mean before clipping."""
    rng = random.Random(seed)
    mu = math.log(mean) - sigma**2 / 2
    return [max(1, min(longest, round(rng.lognormvariate(mu, sigma)))) for _ in range(n)]


def bench(options: argparse.Namespace) -> list[Row]:
    rows = []
    rng = random.Random(1)
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name) if size in SIZES else Path(size)
            if size in SIZES:
                params = build(size, directory, max(2048, options.prompt + options.tokens))
                print(f"# {size}: {params:,} parameters", flush=True)
            for dtype in options.dtypes:
                core = make_core(directory, dtype, options)
                model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype])
                model = model.eval().to(options.device)
                for n in options.concurrency:
                    if "equal" in options.workloads:
                        prompts = [[rng.randrange(3, VOCAB) for _ in range(options.prompt)] for _ in range(n)]
                        lengths = [options.tokens] * n
                        rows.append(measure("equal", size, dtype, n, core, model, prompts, lengths, options))
                    if "mix" in options.workloads and n >= 8:
                        groups = [[rng.randrange(3, VOCAB) for _ in range(options.prompt)] for _ in range(n // 8)]
                        lengths = log_normal_lengths(n, options.mix_mean, options.mix_sigma, options.mix_longest)
                        prompts = [group for group in groups for _ in range(8)]
                        rows.append(measure("mix", size, dtype, n, core, model, prompts, lengths, options))
    return rows


def measure(
    workload: str,
    size: str,
    dtype: str,
    n: int,
    core: EngineCore,
    model: Any,
    prompts: list[list[int]],
    lengths: list[int],
    options: argparse.Namespace,
) -> Row:
    ours, hf, mib, peak = compare(
        (lambda: run_ours(core, prompts, lengths), lambda: run_hf(model, prompts, lengths, options.device)),
        dtype,
        options,
    )
    total = sum(lengths)
    flops = decode_flops(model.config.to_dict(), prompts, lengths)
    row = Row(workload, size, dtype, n, total / ours, total / hf, flops / ours / peak, mib)
    what = f"tokens, {workload} {Path(size).name} {dtype} x{n}, prompts of {options.prompt}: transformers / engine"
    short = {64: 2.5, 256: 2.0}.get(n)
    aim = 4.0 if workload == "mix" else short if options.prompt < 1000 else 1.0
    ratio(what, [ours], [hf], floor=flops / peak, aim=aim)
    return row


def peak_flops(dtype: str, options: argparse.Namespace) -> float:
    """Return the peak FLOP/s of all threads."""
    if options.peak_tflops:
        return float(options.peak_tflops) * 1e12
    threads = 1 if options.device.startswith("cuda") or options.clock == "cpu" else options.threads
    return matmul_flops_per_second(options.device, DTYPES[dtype]) * threads


def summary(rows: list[Row]) -> None:
    """Print ratios to transformers in the same dtype, and of bfloat16 to transformers in float32."""
    base = {(r.workload, r.size, r.concurrency): r.hf for r in rows if r.dtype == "float32"}
    print(
        "\n| workload | model | dtype | concurrent | slime tok/s | transformers tok/s"
        " | ratio | to float32 transformers | mfu | peak MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for r in rows:
        reference = base.get((r.workload, r.size, r.concurrency))
        second = f"{r.ours / reference:.2f}" if reference else "-"
        print(
            f"| {r.workload} | {r.size} | {r.dtype} | {r.concurrency} | {r.ours:,.0f} | {r.hf:,.0f}"
            f" | {r.ours / r.hf:.2f} | {second} | {r.mfu:.2%} | {r.mib:,.0f} |"
        )


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["0.5M", "2M", "10M"], help="names of SIZES or model directories")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--workloads", nargs="+", choices=("equal", "mix"), default=["equal", "mix"])
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of the equal workload")
    parser.add_argument("--mix-mean", type=float, default=64.0, help="mean output tokens of the mix")
    parser.add_argument("--mix-sigma", type=float, default=1.0)
    parser.add_argument("--mix-longest", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall",
        help="cpu: seconds of processor time, steadier on a machine that others use too (with one thread, on CPU)",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--impl", default="auto", choices=("auto", "transformers"), help="as --model-impl")
    parser.add_argument("--peak-tflops", type=float, help="of the device, for mfu; without, a matrix product's")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    print(f"# torch {torch.__version__}, transformers {transformers.__version__}, {options.threads} thread(s)")
    summary(bench(options))


if __name__ == "__main__":
    main()
