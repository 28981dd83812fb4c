"""Engines: the embedded one, a SGLang server asked directly, the same server behind its router, and a vLLM server.

    .venv/bin/python benchmarks/engines.py [--engine-python VENV/bin/python] [--vllm-python VENV/bin/python]
        [--model DIR] [--concurrency 1 8 64] [--tokens 64]

One model, the same prompts, the same sampling parameters, each answer exactly `--tokens` tokens long; the sides take
turns and go through slime's own clients, as a rollout does. The prompts of every round are new, so that no cache helps.
CPU seconds are those of this process and of the side's own processes: the server's, and the router's where it is asked.
"First answer" is the time from sending a round's requests to the first complete answer. The second table has the
largest and the mean difference of log-probs to transformers in float64, a full weight update by the engine's first
transport (median of 3), and the memory of the side's processes, shared pages divided (this process's for the embedded
engine). Without `--engine-python` (or SLIME_ENGINE_PYTHON) and `--vllm-python` only the embedded engine is measured.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from _harness import Parser, spread, table
from slime_commands.init.tiny_model import write_random_model
from slime_embedded.engine.engine import EmbeddedEngine
from slime_engine_http.api.engine import HttpEngine
from slime_engine_sglang.engine import SglangEngine
from slime_engine_vllm.engine import VllmEngine

from slime_core.config import load_settings
from slime_core.models.hf_io import read_weights
from slime_core.sample import GenerationOutput

HEADER = (
    "engine",
    "at once",
    "tokens/s",
    "noise",
    "CPU s / 1000 tokens",
    "first answer s",
    "tokens/s ratio",
    "CPU ratio",
)

COSTS = ("engine", "log-prob gap, largest", "mean", "transport", "update s", "CPU s", "memory MiB")
UPDATES = 3


@dataclass
class Round:
    """A measurement: number of tokens, and in seconds wall time, CPU time and time to the first complete answer."""

    tokens: int
    wall: float
    cpu: float
    first: float


@dataclass
class Side:
    """An engine under test."""

    name: str
    engine: Any
    keepers: list[int] = field(default_factory=list)
    """Process ids of the ancestors of all processes that work for the side."""

    def cpu(self) -> float:
        """Return the CPU seconds used so far, by the side and by this process."""
        used = time.process_time()
        for process in _below(self.keepers):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            used += times.user + times.system
        return used

    def memory(self) -> float:
        """Return the MiB of memory of the side's processes, or of this process."""
        processes = _below(self.keepers) or [psutil.Process()]
        return float(sum(process.memory_full_info().pss for process in processes)) / 2**20


def _below(pids: Iterable[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        process = psutil.Process(pid)
        found += [process, *process.children(recursive=True)]
    return found


async def measure(side: Side, prompts: list[list[int]], at_once: int, tokens: int) -> Round:
    """Request answers to all prompts, `at_once` at a time, and measure."""
    places = asyncio.Semaphore(at_once)
    first: list[float] = []

    async def ask(number: int, prompt: list[int]) -> int:
        params = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": number}
        async with places:
            output = await side.engine.generate(prompt, params)
        if not first:
            first.append(time.perf_counter())
        assert len(output.token_ids) == len(output.log_probs) == tokens
        return tokens

    cpu, began = side.cpu(), time.perf_counter()
    total = sum(await asyncio.gather(*(ask(i, p) for i, p in enumerate(prompts))))
    wall = time.perf_counter() - began
    return Round(total, wall, side.cpu() - cpu, first[0] - began)


async def sampled(side: Side, prompts: list[list[int]], tokens: int) -> list[GenerationOutput]:
    """Return answers at temperature 1, whose log-probs are compared."""
    params = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    return list(await asyncio.gather(*(side.engine.generate(prompt, params) for prompt in prompts)))


def gaps(model: Path, prompts: list[list[int]], answers: dict[str, list[GenerationOutput]]) -> dict[str, torch.Tensor]:
    """Return the absolute differences of all log-probs of a side to those of transformers in float64."""
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)

    def of(prompt: Sequence[int], output: GenerationOutput) -> torch.Tensor:
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        return (wanted - torch.tensor(output.log_probs, dtype=torch.float64)).abs()

    return {name: torch.cat([of(*pair) for pair in zip(prompts, outputs)]) for name, outputs in answers.items()}


async def updated(side: Side, weights: dict[str, torch.Tensor]) -> tuple[str, float, float]:
    """Return the transport of full updates, and the median wall and CPU seconds of one."""
    transport, found = side.engine.weight_transports[0], []
    for version in range(1, UPDATES + 1):
        cpu, began = side.cpu(), time.perf_counter()
        await getattr(side.engine, f"update_weights_from_{transport}")(iter(weights.items()), version)
        found.append((time.perf_counter() - began, side.cpu() - cpu))
    wall, processor = map(statistics.median, zip(*found))
    return transport, wall, processor


def settings(model: Path, folder: Path, *flags: str) -> Any:
    argv = ["--hf-checkpoint", str(model), "--device", "cpu", "--num-threads", "1", "--save", str(folder), *flags]
    args = load_settings(argv, command="serve", env={}).args
    args.run_dir = str(folder)
    return args


async def open_sides(model: Path, folder: Path, python: str | None, vllm_python: str | None) -> list[Side]:
    """Start the engines; those that have processes to end are last."""
    embedded = EmbeddedEngine(settings(model, folder))
    await embedded.start()
    sides = [Side("embedded", embedded)]
    if python:
        sides += await open_sglang(model, folder / "sglang", python)
    if vllm_python:
        flags = ["--rollout-engine", "vllm", "--rollout-num-gpus", "1", "--engine-python", vllm_python]
        engine = VllmEngine(settings(model, folder / "vllm", *flags))
        await engine.start()
        (server,) = engine.supervised[0].servers.values()
        assert server.pid is not None
        sides.append(Side("vLLM", engine, [server.pid]))
    return sides


async def open_sglang(model: Path, folder: Path, python: str) -> list[Side]:
    """Start a server with its router."""
    flags = ["--rollout-engine", "sglang", "--rollout-num-gpus", "1", "--engine-python", python]
    routed = SglangEngine(settings(model, folder, *flags))
    await routed.start()
    assert routed.fleet is not None
    (launched,) = routed.fleet.models
    (server,), router = launched.servers, launched.router
    assert server.pid is not None
    assert router is not None
    assert router.pid is not None
    address = server.url.removeprefix("http://")
    direct = HttpEngine(settings(model, folder, "--rollout-engine", "http", "--rollout-external-engine-addrs", address))
    await direct.start()
    return [Side("SGLang", direct, [server.pid]), Side("SGLang, router", routed, [server.pid, router.pid])]


async def compare(options: SimpleNamespace) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the rows of both tables."""
    with tempfile.TemporaryDirectory() as made:
        folder, model = Path(made), Path(options.model or Path(made) / "model")
        if not options.model:
            write_random_model(model, seed=0)
        rng = random.Random(0)
        sides = await open_sides(model, folder / "run", options.engine_python, options.vllm_python)
        found: list[tuple[str, ...]] = []
        try:
            compared = [[rng.randrange(10, 250) for _ in range(options.prompt)] for _ in range(8)]
            answers = {side.name: await sampled(side, compared, options.tokens) for side in sides}
            for at_once in options.concurrency:
                rounds: dict[str, list[Round]] = {side.name: [] for side in sides}
                for turn in range(options.repeat + 1):
                    count = max(at_once, options.requests)
                    prompts = [[rng.randrange(10, 250) for _ in range(options.prompt)] for _ in range(count)]
                    for side in sides:
                        done = await measure(side, prompts, at_once, options.tokens)
                        await side.engine.flush_cache()
                        if turn:  # the first one warms up
                            rounds[side.name].append(done)
                found += rows(rounds, at_once)
            memory = {side.name: side.memory() for side in sides}
            weights = dict(read_weights(model))
            updates = {side.name: await updated(side, weights) for side in sides}
        finally:
            for side in reversed(sides):
                await side.engine.stop()
        costs = []
        for name, gap in gaps(model, compared, answers).items():
            transport, wall, cpu = updates[name]
            numbers = f"{gap.max():.1e}", f"{gap.mean():.1e}", transport, f"{wall:.2f}", f"{cpu:.2f}"
            costs.append((name, *numbers, f"{memory[name]:.0f}"))
        return found, costs


def rows(rounds: dict[str, list[Round]], at_once: int) -> list[tuple[str, ...]]:
    """Return the table's rows; ratios are against the first side."""
    speeds = {name: [r.tokens / r.wall for r in of_side] for name, of_side in rounds.items()}
    costs = {name: statistics.median(1000 * r.cpu / r.tokens for r in of_side) for name, of_side in rounds.items()}
    base = next(iter(rounds))
    found: list[tuple[str, ...]] = []
    for name, of_side in rounds.items():
        speed = statistics.median(speeds[name])
        ratios = f"{speed / statistics.median(speeds[base]):.2f}", f"{costs[name] / costs[base]:.2f}"
        first = statistics.median(r.first for r in of_side)
        found.append(
            (name, str(at_once), f"{speed:.0f}", spread(speeds[name]), f"{costs[name]:.3f}", f"{first:.3f}", *ratios)
        )
    return found


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--engine-python", default=os.environ.get("SLIME_ENGINE_PYTHON"))
    parser.add_argument("--vllm-python", help="interpreter of vLLM's environment")
    parser.add_argument("--model", help="model directory; by default a tiny random model")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument(
        "--requests", type=int, default=8, help="requests in a round, or the concurrency if that is more"
    )
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each answer")
    parser.add_argument("--repeat", type=int, default=5)
    options: SimpleNamespace = parser.parse_args(argv, namespace=SimpleNamespace())
    torch.set_num_threads(1)
    if not options.engine_python:
        print("SGLang is left out: name its environment with --engine-python VENV/bin/python or SLIME_ENGINE_PYTHON\n")
    speeds, costs = asyncio.run(compare(options))
    print(table(HEADER, speeds), table(COSTS, costs), sep="\n\n")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\nratios: against the embedded engine with as many requests at once; load of the machine: {load}")


if __name__ == "__main__":
    main()
