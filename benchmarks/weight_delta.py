"""Weight deltas: how much of the model changes per push, and what writing and applying a delta costs.

    .venv/bin/python benchmarks/weight_delta.py [--steps 30] [--mib 128]

First table: the quick start's model (random weights, float32 masters) learns its sums by AdamW, one step per push;
after a warm-up every push is written as a delta of a bfloat16 and of a float32 copy. Second table: `--mib` of bfloat16
weights of which a share changes, written and applied (files flushed to the device), against a copy of the same bytes
in memory, sides taking turns.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _harness import Parser, spread, table
from safetensors.torch import save_file
from slime_commands.init import task
from slime_commands.init.tiny_model import write_random_model
from slime_weight_transport_delta.apply import apply
from slime_weight_transport_delta.writer import DeltaWriter

RATES = (1e-6, 1e-5, 1e-4)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ENCODINGS = ("xor", "overwrite")


class Learner:
    """The demo model, its data and AdamW with slime's defaults."""

    def __init__(self, directory: Path, lr: float) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        rows = task.rl_rows(task.split_problems()[0][:512], "input", "label")
        texts = [f"{json.dumps(row['input'])} {row['label']}" for row in rows]
        self._rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)

    def step(self, number: int) -> None:
        rows = self._rows[(number * 16) % 496 :][:16]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
        self._model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        tied = self._model.config.tie_word_embeddings
        named = self._model.named_parameters()
        return {n: p.detach().to(dtype) for n, p in named if not (tied and n == "lm_head.weight")}


def training(folder: Path, lr: float, steps: int) -> Iterator[list[str]]:
    """Rows of the first table for one learning rate."""
    write_random_model(folder / "model", seed=0)
    learner = Learner(folder / "model", lr)
    for number in range(steps):
        learner.step(number)
    sides: dict[tuple[str, str], DeltaWriter] = {}
    seen: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for name, dtype in DTYPES.items():
        for encoding in ENCODINGS:
            start = folder / f"start-{name}-{encoding}"
            start.mkdir()
            save_file(learner.weights(dtype), start / "model.safetensors")
            (start / "config.json").write_text("{}")
            writer = DeltaWriter(folder / f"{name}-{encoding}", start, run_dir=str(folder), encoding=encoding)
            writer.write(learner.weights(dtype).items(), 1)
            sides[name, encoding], seen[name, encoding] = writer, []
    for version in range(2, 7):
        learner.step(steps + version)
        for (name, encoding), writer in sides.items():
            written = writer.write(learner.weights(DTYPES[name]).items(), version)
            full = written.density == 1.0
            if not full:  # the chain outweighed the model: no delta, and the next one starts from here
                seen[name, encoding].append((written.density, written.wire_bytes))
    for (name, encoding), pushes in seen.items():
        size = sum(t.nbytes for t in learner.weights(DTYPES[name]).values())
        if not pushes:
            yield [f"{lr:.0e}", name, encoding, "100%", "-", "0"]
            continue
        density = statistics.median(d for d, _ in pushes)
        wire = statistics.median(b for _, b in pushes)
        shares = f"{100 * density:.2f}%", f"{100 * wire / size:.1f}%"
        yield [f"{lr:.0e}", name, encoding, *shares, str(len(pushes))]


def timing(folder: Path, mib: int, share: float, encoding: str, rounds: int) -> list[str]:
    """A row of the second table."""
    generator = torch.Generator().manual_seed(0)
    count = mib * 1024**2 // 2
    weights = {f"layer{i}": torch.randn(count // 8, generator=generator).bfloat16() for i in range(8)}
    start = folder / "start"
    start.mkdir()
    save_file(weights, start / "model.safetensors")
    writer = DeltaWriter(folder / "source", start, run_dir=str(folder), encoding=encoding)
    writer.write(weights.items(), 1)
    apply(folder / "source", folder / "local", 1)
    target = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    seconds: dict[str, list[float]] = {"copy": [], "write": [], "apply": []}
    wire = 0
    for version in range(2, rounds + 2):
        for tensor in weights.values():
            touched = torch.rand(tensor.shape, generator=generator) < share
            tensor[touched] = torch.randn(int(touched.sum()), generator=generator).bfloat16()
        seconds["copy"].append(timed(lambda: [target[n].copy_(t) for n, t in weights.items()]))
        written: list[Any] = []
        seconds["write"].append(timed(lambda: written.append(writer.write(weights.items(), version))))  # noqa: B023
        seconds["apply"].append(timed(lambda: apply(folder / "source", folder / "local", version)))  # noqa: B023
        if written[0].density < 1 or share == 1:
            wire = written[0].wire_bytes
        writer.prune()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return [
        f"{100 * share:g}%", encoding, f"{100 * wire / (mib * 1024**2):.1f}%",
        *(f"{1000 * medians[name]:.0f}" for name in ("copy", "write", "apply")),
        *(f"{medians[name] / medians['copy']:.1f}" for name in ("write", "apply")),
        spread(seconds["write"]),
    ]  # fmt: skip


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps before the first push")
    parser.add_argument("--mib", type=int, default=128, help="size of the model that is timed")
    parser.add_argument("--rounds", type=int, default=3, help="versions that are timed")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    for lr in RATES:
        with tempfile.TemporaryDirectory() as folder:
            rows += list(training(Path(folder), lr, given.steps))
    header = ["learning rate", "copy", "encoding", "elements changed", "delta / full bytes", "pushes"]
    print(f"quick start's model, one AdamW step per push, after {given.steps} steps")
    print(table(header, rows))
    rows = []
    for share in (0.001, 0.01, 0.1):
        for encoding in ENCODINGS:
            folder = Path(tempfile.mkdtemp())
            try:
                rows.append(timing(folder, given.mib, share, encoding, given.rounds))
            finally:
                shutil.rmtree(folder)
    print(f"\n{given.mib} MiB of bfloat16, {given.threads} thread(s); milliseconds, and times the copy in memory")
    header = ["changed", "encoding", "delta / full bytes", "copy", "write", "apply", "write/copy", "apply/copy"]
    print(table([*header, "spread of write"], rows))


if __name__ == "__main__":
    main()
