"""Writes one JSON line per stage that a run reaches, with wall and CPU time, to the file named by BENCH_CLOCK_FILE.

The benchmarks load it with `--plugin-dir benchmarks/clock`. `time` is that of `time.time()`, so that the process which
started the run can compare it with its own; `cpu` is that of all threads and of all processes it started.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from slime_core import hookimpl

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _harness import cpu_seconds, peak_mib

_FILE = os.environ.get("BENCH_CLOCK_FILE", os.devnull)


def _mark(event: str, **facts: Any) -> None:
    with Path(_FILE).open("a", encoding="utf-8") as file:
        file.write(
            json.dumps({"event": event, "time": time.time(), "cpu": cpu_seconds(), "peak_mib": peak_mib(), **facts})
            + "\n"
        )


@hookimpl
def slime_configure() -> None:
    _mark("configured", torch_loaded="torch" in sys.modules)


@hookimpl
def slime_run_start() -> None:
    _mark("run_start")


@hookimpl
def slime_weights_updated(weight_version: int) -> None:
    _mark("weights_updated", weight_version=weight_version)


@hookimpl
def slime_rollout_end(rollout_id: int, groups: list[Any]) -> None:
    lengths = [sample.response_length for group in groups for sample in group]
    prompts = [len(sample.tokens) - sample.response_length for group in groups for sample in group]
    _mark("rollout_end", rollout_id=rollout_id, response_lengths=lengths, prompt_tokens=sum(prompts))


@hookimpl
def slime_step_end(rollout_id: int) -> None:
    _mark("step_end", rollout_id=rollout_id)


@hookimpl
def slime_run_end() -> None:
    _mark("run_end")


_mark("loaded")
