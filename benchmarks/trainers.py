"""The trainers and plain transformers: one optimizer step, and the export of weights.

First part: tokens per second, tokens per second of processor time and peak memory (of all ranks) of one GRPO step
(forward, backward, clipping, AdamW) on the same weights and samples in micro-batches of 8, all in one run. "hf" is
transformers alone: each micro-batch padded to its longest sample, or one sequence at a time. "transformers" after a
trainer's name is `--model-impl transformers`. Second part: the export of weights to
engines (`named_weights`: Megatron's names and shards -> HF's tensors, copied into buckets of shared memory as with
`--update-weight-transport tensor`), in seconds per GB, compared with a copy of the same bytes.

    python benchmarks/trainers.py [--sizes 1M 10M] [--rounds 5] [--threads 1] [--quick]
    python benchmarks/trainers.py --sizes 135M --sides embedded "fsdp, 2 ranks" --export-size none
    python benchmarks/trainers.py --device cuda --dtype bfloat16 --sizes 0.6B --samples 64 --export-size 0.6B

Every side is a process, or one process per rank. The sides alternate step by step, so that a busy machine affects all
of them. Processor time is the sum over ranks. The sides' losses are compared after every step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _harness import Parser, spread, table

# size -> hidden, inner, layers, heads, key-value heads, head_dim, vocabulary
SIZES: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "0.1M": (64, 128, 2, 4, 2, 16, 264),
    "1M": (128, 384, 4, 4, 2, 32, 2048),
    "10M": (384, 1024, 5, 6, 2, 64, 6144),
    "90M": (768, 2304, 12, 12, 4, 64, 8192),
    "135M": (576, 1536, 30, 9, 3, 64, 49_152),
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151_936),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151_936),
}
PLAIN = {
    "hf eager, padded": {"attention": "eager", "single": False},
    "hf eager, one by one": {"attention": "eager", "single": True},
    "hf sdpa, padded": {"attention": "sdpa", "single": False},
    "hf sdpa, one by one": {"attention": "sdpa", "single": True},
}
SLIME = {
    "embedded": {"trainer": "embedded"},
    "embedded, transformers": {"trainer": "embedded", "impl": "transformers"},
    "fsdp, 1 rank": {"trainer": "fsdp"},
    "fsdp, 2 ranks": {"trainer": "fsdp", "data": 2},
    "fsdp, 2 ranks, transformers": {"trainer": "fsdp", "data": 2, "impl": "transformers"},
    "megatron, 1 rank": {"trainer": "megatron"},
    "megatron, TP2": {"trainer": "megatron", "tensor": 2},
    "megatron, PP2": {"trainer": "megatron", "pipeline": 2},
}
STEP_SIDES = [*PLAIN, *(name for name in SLIME if "PP2" not in name)]
EXPORT_SIDES = [name for name in SLIME if "transformers" not in name]
SIDES: dict[str, dict[str, Any]] = {**PLAIN, **SLIME}
ONE = {"tensor": 1, "pipeline": 1, "data": 1}
STEP_HEADER = (
    "side", "tokens/s", "spread", "tokens/cpu-s", "spread", "to best hf", "utilisation", "peak MiB", "above imports",
)  # fmt: skip
EXPORT_HEADER = (
    "side", "copy s/GB", "export s/GB", "spread", "ratio", "copy cpu-s/GB", "export cpu-s/GB", "ratio", "GB/s",
)  # fmt: skip
DEADLINE_SECONDS = 900
"""Deadline of a start, a step or an export."""


def hf_config(size: str) -> dict[str, Any]:
    hidden, inner, layers, heads, groups, head_dim, vocab = SIZES[size]
    return {
        "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head_dim, "vocab_size": vocab,
        "max_position_embeddings": 4096, "tie_word_embeddings": True, "initializer_range": 0.02,
    }  # fmt: skip


def make_model(directory: Path, size: str) -> int:
    """Make a random checkpoint of the size. Return the number of its parameters."""
    from slime_embedded.models.decoder import init_weights

    from slime_core.models.config import ModelConfig
    from slime_core.models.hf_io import write_config, write_weights

    hf = hf_config(size)
    weights = dict(init_weights(ModelConfig.from_hf(hf, qk_norm=True), seed=0).items())
    directory.mkdir(parents=True)
    write_weights(directory, weights.items())
    write_config(directory, hf)
    return sum(tensor.numel() for tensor in weights.values())


class Side:
    """The processes of one side, one per rank."""

    def __init__(self, name: str, job: dict[str, Any]) -> None:
        from torch.distributed import TCPStore

        self.name = name
        job = {**ONE, "trainer": "plain", "impl": "auto", "single": False, **job, **SIDES[name]}
        ranks = job["tensor"] * job["pipeline"] * job["data"]
        # As under torchrun, whose agent holds the store, so that no rank needs a free port.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks = [self._start(job, rank, ranks) for rank in range(ranks)]

    def _start(self, job: dict[str, Any], rank: int, ranks: int) -> subprocess.Popen[str]:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "OMP_NUM_THREADS": job["threads"]}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        environment = {**os.environ, **{name: str(value) for name, value in {**place, **meeting}.items()}}
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("_trainer_sides.py")),
             json.dumps({**job, "rank": rank})],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> Side:
        self._answers()
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                assert pipe is not None
                pipe.close()

    def ask(self, what: str, *, everywhere: bool = True) -> list[dict[str, Any]]:
        """Send a command and return the replies of all ranks, or only of the first rank."""
        asked = self._ranks if everywhere else self._ranks[:1]
        for rank in asked:
            assert rank.stdin is not None
            rank.stdin.write(what + "\n")
            rank.stdin.flush()
        return self._answers(asked)

    def _answers(self, asked: list[subprocess.Popen[str]] | None = None) -> list[dict[str, Any]]:
        found = []
        for rank in asked or self._ranks:
            assert rank.stdout is not None
            # A rank replies with one complete line, and only to a command.
            ready, _, _ = select.select([rank.stdout], [], [], DEADLINE_SECONDS)
            line = rank.stdout.readline() if ready else ""
            if not line:
                what = "a process ended" if ready else f"no answer within {DEADLINE_SECONDS} s"
                raise SystemExit(f"{self.name}: {what}; what it wrote is above")
            found.append(json.loads(line))
        return found


def check_same(found: dict[str, list[dict[str, Any]]], dtype: str) -> None:
    """Check that every side computed the same step."""
    (first, expected), *others = ((name, steps[-1]["metrics"]) for name, steps in found.items())
    close = 2e-3 if dtype == "float32" else 5e-2
    for name, metrics in others:
        for key in ("loss", "log_probs", "grad_norm"):
            if abs(metrics[key] - expected[key]) > close * (abs(expected[key]) + 0.01):
                raise SystemExit(f"{name} has {key} {metrics[key]}, {first} has {expected[key]}")


def together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the measurement of all ranks: the longest wall time, and the sums of CPU time and memory."""
    sums = {key: sum(a[key] for a in answers) for key in ("cpu", "peak", "before") if key in answers[0]}
    return {**answers[0], "wall": max(a["wall"] for a in answers), **sums}


def steps(options: argparse.Namespace, size: str, names: list[str], directory: Path) -> None:
    """Measure and print the first part's table of one size."""
    import torch
    from _measure import matmul_flops_per_second, step_flops
    from trainer import make_samples

    parameters = make_model(directory, size)
    hf = hf_config(size)
    samples = make_samples(options.samples, hf["vocab_size"])
    lengths = [len(tokens) for tokens, _ in samples]
    job = {
        **shared(options),
        "what": "step",
        "model": str(directory),
        "samples": len(samples),
        "vocab": hf["vocab_size"],
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(name, job)) for name in names]
        for _ in range(options.rounds + 1):
            for side in sides:
                found[side.name].append(together(side.ask("step")))
            check_same(found, options.dtype)
    peak = options.peak_tflops * 1e12 if options.peak_tflops else 0.0
    peak = peak or matmul_flops_per_second(options.device, getattr(torch, options.dtype))
    clock = "wall" if options.device.startswith("cuda") else "cpu"
    middle = {
        name: {key: statistics.median(s[key] for s in steps[1:]) for key in ("wall", "cpu")}
        for name, steps in found.items()
    }
    plain = [name for name in names if name in PLAIN]
    best = min(plain, key=lambda name: middle[name][clock]) if plain else names[0]
    rows = []
    for name, steps in found.items():
        wall, cpu = middle[name]["wall"], middle[name]["cpu"]
        used, last = middle[name][clock], steps[-1]
        rows.append([
            name, f"{sum(lengths) / wall:,.0f}", spread([s["wall"] for s in steps[1:]]),
            f"{sum(lengths) / cpu:,.0f}", spread([s["cpu"] for s in steps[1:]]),
            f"{middle[best][clock] / used:.2f}x", f"{step_flops(hf, lengths) / used / peak:.1%}",
            f"{last['peak']:,.0f}", f"{last['peak'] - last['before']:,.0f}",
        ])  # fmt: skip
    work = f"{parameters:,} parameters, {len(samples)} samples, {sum(lengths):,} tokens"
    print(f"\none GRPO step, {work}, {about(options)}\n{table(STEP_HEADER, rows)}")
    by = "seconds" if clock == "wall" else "processor seconds"
    print(f"best hf: {best}, by {by}; utilisation of {peak / 1e9:,.1f} GFLOP/s", flush=True)


def exports(options: argparse.Namespace, names: list[str], directory: Path) -> None:
    """Measure and print the second part's table."""
    parameters = make_model(directory, options.export_size)
    job = {**shared(options), "what": "export", "model": str(directory), "bucket_mib": options.bucket_mib}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {name: {"copy": [], "export": []} for name in names}
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(name, job)) for name in names]
        for turn in range(options.rounds + 1):
            for side in sides:
                copied = side.ask("copy", everywhere=False)
                exported = side.ask("export")
                if turn:
                    found[side.name]["copy"].append(together(copied))
                    found[side.name]["export"].append({**together(exported), "bytes": exported[0]["bytes"]})
    nbytes = {part["bytes"] for sides_found in found.values() for part in sides_found["export"]}
    assert len(nbytes) == 1, f"the sides exported {nbytes} bytes"
    size = nbytes.pop()
    rows = []
    for name, parts in found.items():
        wall = {what: statistics.median(a["wall"] for a in answers) for what, answers in parts.items()}
        cpu = {what: statistics.median(a["cpu"] for a in answers) for what, answers in parts.items()}
        per_gb = {key: value * 1e9 / size for key, value in wall.items()}
        cpu_per_gb = {key: value * 1e9 / size for key, value in cpu.items()}
        rows.append([
            name, f"{per_gb['copy']:.3f}", f"{per_gb['export']:.3f}", spread([a["wall"] for a in parts["export"]]),
            f"{per_gb['export'] / per_gb['copy']:.1f}x", f"{cpu_per_gb['copy']:.3f}", f"{cpu_per_gb['export']:.3f}",
            f"{cpu_per_gb['export'] / cpu_per_gb['copy']:.1f}x", f"{1 / per_gb['export']:.2f}",
        ])  # fmt: skip
    what = f"{parameters:,} parameters, {size / 1e9:.3f} GB, in buckets of {options.bucket_mib} MiB"
    print(f"\nweights into buckets, {what}, {about(options)}\n{table(EXPORT_HEADER, rows)}", flush=True)


def shared(options: argparse.Namespace) -> dict[str, Any]:
    return {"device": options.device, "dtype": options.dtype, "threads": options.threads}


def about(options: argparse.Namespace) -> str:
    return f"{options.dtype}, {options.device}, {options.threads} thread(s) per rank, {os.cpu_count()} cores"


def fitting(names: list[str], device: str) -> list[str]:
    """Return the sides that fit the number of GPUs; print the others."""
    import torch

    if not device.startswith("cuda"):
        return names
    needs = {name: math.prod(SIDES[name].get(axis, 1) for axis in ONE) for name in names}
    for name, ranks in needs.items():
        if ranks > torch.cuda.device_count():
            print(f"left out: {name}: {ranks} ranks, {torch.cuda.device_count()} GPU(s)")
    return [name for name, ranks in needs.items() if ranks <= torch.cuda.device_count()]


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=["1M", "10M"], help="of the first part")
    parser.add_argument("--export-size", choices=[*SIZES, "none"], default="90M", help="of the second part")
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="only these, in either part")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument(
        "--rounds", type=int, default=5, help="timed steps and exports of each side, after one that is not"
    )
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--bucket-mib", type=int, default=512, help="as --update-weight-buffer-size")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--peak-tflops", type=float, help="of the device, for utilisation; without, a matrix product's")
    parser.add_argument("--quick", action="store_true", help="tiny models, two rounds: does it run at all")
    options = parser.parse_args(argv)
    if options.quick:
        options.sizes, options.export_size, options.samples, options.rounds = ["0.1M"], "0.1M", 8, 2
    import torch

    torch.set_num_threads(options.threads)
    step_names = fitting([n for n in STEP_SIDES if not options.sides or n in options.sides], options.device)
    export_names = fitting([n for n in EXPORT_SIDES if not options.sides or n in options.sides], options.device)
    with tempfile.TemporaryDirectory() as made:
        for size in options.sizes if step_names else ():
            steps(options, size, step_names, Path(made) / size)
        if options.export_size != "none" and export_names:
            exports(options, export_names, Path(made) / "export")


if __name__ == "__main__":
    main()
