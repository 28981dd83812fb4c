"""Measure --streaming-data and --num-data-workers: time to the first prompt, and time of a draw in the loop.

    .venv/bin/python benchmarks/data_reading.py [--rows 2000000] [--draws 20]

The file contains chat prompts of about 300 words. "first prompt" is the time from opening the data source to the first
drawn group. "a draw" is the median time of `get_samples(32)` after a pause of 0.1 s, in which a rollout would generate.
The threads work in the pause, so they shorten the draw but not the total work.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
from _harness import Parser, table
from slime_testing_probes.scripted import CharTokenizer

from slime_core.config import load_settings
from slime_core.data.prompts import DatasetSource


def main() -> None:
    """Measure each setting in turn and print a table."""
    parser = Parser(__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--draws", type=int, default=20)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        path = Path(folder, "prompts.jsonl")
        line = orjson.dumps({"input": "how many words are in this one? " * 40, "label": "7"}) + b"\n"
        with path.open("wb") as file:
            for _ in range(options.rows // 1000):
                file.write(line * 1000)
        print(f"{options.rows} rows, {path.stat().st_size / 1e9:.2f} GB")
        rows = []
        stream, workers = ["--streaming-data"], ["--num-data-workers", "2"]
        for flags in ([], stream, workers, [*stream, *workers]):
            first, draw = measure(path, flags, options.draws)
            rows.append([" ".join(flags) or "neither", f"{first:.3f} s", f"{draw * 1e3:.1f} ms"])
        print(table(["settings", "first prompt", "a draw of 32 prompts"], rows))


def measure(path: Path, flags: list[str], draws: int) -> tuple[float, float]:
    """Return the seconds to the first prompt and the seconds of a draw."""
    argv = ["--hf-checkpoint", "none", "--prompt-data", str(path), "--rollout-batch-size", "32", "--rm-type", "math"]
    args: Any = load_settings([*argv, "--num-rollout", "1", "--rollout-max-response-len", "8", *flags]).args
    started = time.perf_counter()
    source = DatasetSource(args, CharTokenizer())
    source.get_samples(1)
    first = time.perf_counter() - started
    times = []
    for _ in range(draws):
        time.sleep(0.1)
        started = time.perf_counter()
        source.get_samples(32)
        times.append(time.perf_counter() - started)
    source.close()
    return first, statistics.median(times)


if __name__ == "__main__":
    main()
