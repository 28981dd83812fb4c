"""Compare the embedded trainer with a plain transformers training loop: tokens/s, peak memory, and the log-prob step.

Speed: one optimizer step over responses of log-normal length. The plain loop is the obvious implementation: the HF
model, each micro-batch padded to its longest sample, log-softmax over the full logits, torch's fused AdamW. Weights,
samples, micro-batches, loss and optimizer settings are the same, and the losses are compared. Memory of the log-prob
step: forward and backward through an output layer of 151,936 tokens, with chunks or with full logits.

    python benchmarks/trainer.py [--rounds 3] [--threads 1] [--tiny]
    python benchmarks/trainer.py --device cuda --dtype bfloat16 --large
    python benchmarks/trainer.py --model outputs/bench/SmolLM2 --threads 2 --samples 64 --length 24 --micro-batch 32

Every measurement runs in its own process and the sides alternate, so that peaks are separate and noise is visible.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _harness import Parser, ratio, spread, table
from _measure import PeakMemory, matmul_flops_per_second, step_flops, wait_for

from slime_core.config import Args

MEDIUM = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 8192}
LARGE = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151_936,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "initializer_range": 0.02,
}  # fmt: skip
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 264}
HF = {
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
STEPS, MICRO_BATCH, LR = 3, 8, 1e-4
PRODUCTS = ("_Product", "_ProductBackward", "aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")
HEAD_TOKENS, HEAD_HIDDEN, HEAD_VOCAB = 1024, 64, 151_936


def make_model(directory: Path, shape: dict[str, Any]) -> None:
    from slime_embedded.models.decoder import init_weights

    from slime_core.models.config import ModelConfig
    from slime_core.models.hf_io import write_config, write_weights

    write_weights(directory, init_weights(ModelConfig.from_hf(shape, qk_norm=True), seed=0).items())
    write_config(directory, shape)


def make_samples(count: int, vocab: int, length: int | None = None) -> list[tuple[list[int], int]]:
    """(tokens, response length) with prompts of 16-48 tokens; responses of `length`, or log-normal ones: median 64, at
    most 768."""
    rng = random.Random(0)
    samples = []
    for _ in range(count):
        prompt, drawn = rng.randint(16, 48), min(768, max(4, round(rng.lognormvariate(4.16, 0.9))))
        response = length or drawn
        samples.append(([rng.randrange(vocab) for _ in range(prompt + response)], response))
    return samples


def micro_batches(count: int, size: int = MICRO_BATCH) -> list[list[int]]:
    return [list(range(i, min(i + size, count))) for i in range(0, count, size)]


def train_batch(samples: list[tuple[list[int], int]]) -> Any:
    """Return the samples as a batch for slime's trainers, with every response token trained."""
    from slime_core.sample import TrainBatch

    count, responses = len(samples), [response for _, response in samples]
    return TrainBatch(
        rollout_id=0,
        tokens=[tokens for tokens, _ in samples],
        response_lengths=responses,
        loss_masks=[[1] * n for n in responses],
        rewards=[0.0] * count,
        raw_rewards=[0.0] * count,
        truncated=[0] * count,
        sample_indices=list(range(count)),
        group_indices=[0] * count,
        rollout_ids=list(range(count)),
        rollout_mask_sums=responses,
    )


def timed(step: Callable[[], float], device: str) -> dict[str, Any]:
    """Run one warm-up and `STEPS` timed steps; wall and processor seconds of the median one, peak memory, losses."""
    seconds, processor, losses = [], [], []
    with PeakMemory(device) as memory:
        for _ in range(STEPS + 1):
            start, used = time.perf_counter(), time.process_time()
            losses.append(step())
            wait_for(device)
            seconds.append(time.perf_counter() - start)
            processor.append(time.process_time() - used)
    wall, cpu = statistics.median(seconds[1:]), statistics.median(processor[1:])
    return {"seconds": wall, "cpu": cpu, "mib": memory.mib, "losses": losses}


def slime_step(job: dict[str, Any], samples: list[tuple[list[int], int]]) -> Callable[[], float]:
    import torch
    from slime_embedded.trainer.trainer import EmbeddedTrainer

    from slime_core.protocols import MicroBatchOutput

    settings = {"lr": LR, "lr_decay_style": "constant", "clip_grad": 1.0, "weight_decay": 0.0}
    place = {"hf_checkpoint": job["model"], "device": job["device"], "dtype": job["dtype"]}
    trainer = EmbeddedTrainer(Args(**place, **settings))
    batch, total = train_batch(samples), sum(response for _, response in samples)

    def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -output.log_probs.sum() / total
        return loss, {"loss": loss}

    return lambda: trainer.train_step(batch, micro_batches(len(samples), job["micro_batch"]), loss_fn).metrics["loss"]


def plain_step(job: dict[str, Any], samples: list[tuple[list[int], int]]) -> Callable[[], float]:
    """bfloat16 is autocast over float32 weights, as in slime."""
    import torch
    from transformers import AutoModelForCausalLM

    device = job["device"]
    network = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=0.0, fused=True)
    total = sum(response for _, response in samples)
    # slime's gradients and moments exist before its first step; without these, only this side's would be counted.
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].zero_()

    def padded(positions: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        longest = max(len(samples[i][0]) for i in positions)
        ids = torch.zeros(len(positions), longest, dtype=torch.long)
        attention, mask = torch.zeros_like(ids), torch.zeros(len(positions), longest)
        for row, i in enumerate(positions):
            tokens, response = samples[i]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            attention[row, : len(tokens)] = 1
            mask[row, len(tokens) - response : len(tokens)] = 1
        return ids.to(device), attention.to(device), mask.to(device)

    def step() -> float:
        optimizer.zero_grad()
        value = 0.0
        for positions in micro_batches(len(samples), job["micro_batch"]):
            ids, attention, mask = padded(positions)
            with torch.autocast(device, torch.bfloat16, enabled=job["dtype"] == "bfloat16"):
                logits = network(input_ids=ids, attention_mask=attention, use_cache=False).logits
            log_probs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
            chosen = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)
            loss = -(chosen * mask[:, 1:]).sum() / total
            loss.backward()
            value += loss.item()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        return value

    return step


def head_memory(side: str, device: str) -> dict[str, Any]:
    """Measure forward and backward of the log-prob step alone: hidden states to log-probs and back."""
    import torch
    from slime_embedded.models.logprobs import token_log_probs

    torch.manual_seed(0)
    hidden = torch.randn(HEAD_TOKENS, HEAD_HIDDEN).to(device).requires_grad_()
    weight = (0.02 * torch.randn(HEAD_VOCAB, HEAD_HIDDEN)).to(device).requires_grad_()
    targets = torch.randint(0, HEAD_VOCAB, (HEAD_TOKENS,)).to(device)
    start, used = time.perf_counter(), time.process_time()
    with PeakMemory(device) as memory:
        if side == "slime":
            log_probs, _ = token_log_probs(hidden, weight, targets)
        else:
            log_probs = torch.log_softmax(hidden @ weight.T, dim=-1).gather(-1, targets[:, None])
        log_probs.mean().backward()
        wait_for(device)
    seconds, cpu = time.perf_counter() - start, time.process_time() - used
    return {"seconds": seconds, "cpu": cpu, "mib": memory.mib, "losses": [log_probs.mean().item()]}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job and return its measurements; called in the child process."""
    import torch

    torch.set_num_threads(job["threads"])
    if job["what"] == "head":
        return head_memory(job["side"], job["device"])
    samples = make_samples(job["samples"], job["vocab"], job["length"])
    step = (slime_step if job["side"] == "slime" else plain_step)(job, samples)
    return timed(step, job["device"])


def child(job: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--busy-anyway", "--child", json.dumps(job)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(job: dict[str, Any], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Measure both sides in turn; exit if they computed different losses."""
    results: dict[str, list[dict[str, Any]]] = {"slime": [], "plain": []}
    for _ in range(rounds):
        for side, found in results.items():
            found.append(child({**job, "side": side}))
    ours, theirs = (results[side][0]["losses"] for side in results)
    close = 1e-3 if job["dtype"] == "float32" else 3e-2
    for a, b in zip(ours, theirs, strict=True):
        if abs(a - b) > close * abs(b):
            raise SystemExit(f"the sides computed different losses: {ours} and {theirs}")
    return results


def report(name: str, results: dict[str, list[dict[str, Any]]], tokens: int) -> dict[str, dict[str, float]]:
    """Print the table and return the medians of each side."""
    rows, medians = [], {}
    for side, found in results.items():
        medians[side] = {key: statistics.median(r[key] for r in found) for key in ("seconds", "cpu", "mib")}
        wall, cpu, mib = medians[side].values()
        noise = spread([r["seconds"] for r in found])
        rows.append([side, f"{tokens / wall:,.0f}", noise, f"{tokens / cpu:,.0f}", f"{mib:,.0f}"])
    print(f"\n{name}\n" + table(["side", "tokens/s", "spread", "tokens/cpu-s", "peak MiB"], rows))
    for key, what in (("seconds", "wall"), ("cpu", "processor"), ("mib", "peak memory")):
        ours, theirs = ([r[key] for r in results[side]] for side in ("slime", "plain"))
        ratio(f"{name}: transformers / trainer, {what}", ours, theirs)
    return medians


def utilisation(medians: dict[str, dict[str, float]], flops: int, job: dict[str, Any], peak: float | None) -> None:
    """Print the FLOP utilisation of each side's step; on CPU by processor seconds, so other load does not count."""
    import torch

    torch.set_num_threads(1)  # The processor time of several threads is read too coarsely for one product.
    peak = peak or matmul_flops_per_second(job["device"], getattr(torch, job["dtype"])) / 1e12
    clock = "seconds" if job["device"] == "cuda" else "cpu"
    shares = ", ".join(f"{side} {flops / found[clock] / peak / 1e12:.1%}" for side, found in medians.items())
    print(f"model FLOP utilisation, of {peak:.3g} TFLOP/s: {shares}")


def product_share(job: dict[str, Any], samples: list[tuple[list[int], int]]) -> float:
    """Return the share of slime's step, by the profiler's processor time, that is spent in matrix products."""
    from torch.profiler import ProfilerActivity, profile

    step = slime_step(job, samples)
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    spent = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    return sum(spent.get(name, 0.0) for name in PRODUCTS) / sum(spent.values())


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, help="tokens of every response, instead of log-normal numbers")
    parser.add_argument("--micro-batch", type=int, default=MICRO_BATCH, help="samples per forward and backward pass")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--tiny", action="store_true", help="the demo's 331k-parameter model instead of one of 5M")
    size.add_argument("--large", action="store_true", help="Qwen3-0.6B's shape, for a GPU")
    size.add_argument("--model", metavar="DIR", help="a model directory")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of matrix products")
    parser.add_argument("--peak-tflops", type=float, help="of the device, for utilisation; without, a matrix product's")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(json.loads(options.child))))
        return
    import torch

    torch.set_num_threads(options.threads)
    shape = {**HF, **(TINY if options.tiny else LARGE if options.large else MEDIUM)}
    if options.model:
        shape = json.loads((Path(options.model) / "config.json").read_text(encoding="utf-8"))
    place = {"threads": options.threads, "device": options.device, "dtype": options.dtype}
    with tempfile.TemporaryDirectory() as directory:
        if not options.model:
            make_model(Path(directory), shape)
        job = {**place, "model": options.model or directory, "vocab": shape["vocab_size"]}
        job |= {"samples": options.samples, "length": options.length, "micro_batch": options.micro_batch}
        lengths = [len(tokens) for tokens, _ in make_samples(options.samples, shape["vocab_size"], options.length)]
        tokens = sum(lengths)
        of = f"of {options.length} + prompt" if options.length else "log-normal"
        name = f"optimizer step, {options.samples} samples {of}, {tokens} tokens"
        medians = report(name, compare({**job, "what": "step"}, options.rounds), tokens)
        utilisation(medians, step_flops(shape, lengths), place, options.peak_tflops)
        if options.device == "cpu":
            share = product_share(job, make_samples(options.samples, shape["vocab_size"], options.length))
            print(f"share of matrix products in slime's step: {share:.1%}")
    if options.length or options.model:
        return
    head = compare({**place, "what": "head", "dtype": "float32"}, options.rounds)
    name = f"log-prob step, {HEAD_TOKENS} tokens, vocabulary {HEAD_VOCAB:,}"
    report(name, head, HEAD_TOKENS)


if __name__ == "__main__":
    main()
