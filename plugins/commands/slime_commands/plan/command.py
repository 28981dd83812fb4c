"""`slime plan` (train): predict batches, placement, memory and step time of a run.

Loads the classes of trainer and engine, and torch with them; with `--trace` alone neither.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError
from slime_core.plugins.commands import Parser
from slime_core.protocols import Command
from slime_core.text import json_text

_HELP = """usage: slime plan [RUN.yaml] [--num-gpus N] [--num-cpus N] [--gpu-memory-gib X] [--json] [flags]
       slime plan --trace RUN [--what CHANGES ...] [--json]

Print batch arithmetic, schedule, placement, a memory estimate per device and a bound of the time, or predict other
settings from a recorded run. Nothing is started, and neither GPUs nor weights need to be there: --model NAME tells the
numbers of a model that is not (`slime models list` prints the names).

  RUN.yaml            same as --config RUN.yaml
  --num-gpus N        plan for N GPUs, over all nodes of --num-gpus-per-node; 0 is a cluster without;
                      by default the GPUs that are visible here
  --num-cpus N        CPUs of the cluster; by default as many as are needed
  --gpu-memory-gib X  of each GPU, to compare the estimate with; and what a server's cache has room for
  --trace RUN         run directory with trace.jsonl: step time, idle shares, staleness, wasted tokens, as measured, as
                      predicted for the same settings, and for each --what
  --what CHANGES      such as async=full,staleness=4,engines=2; repeatable. Names: {names}
  --json              one JSON object

All other flags are settings; `slime train --help-all` lists them. Exit status: 0, or 2 when there can be no
such run."""


def run(argv: list[str]) -> int:
    """Print the plan. Raises ConfigError and PluginError."""
    from slime_commands.plan.predict import WHAT

    if not argv or "-h" in argv or "--help" in argv:
        print(_HELP.format(names=", ".join(WHAT)))
        return 0
    parser = Parser(prog="slime plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--num-gpus", type=int)
    parser.add_argument("--num-cpus", type=float)
    parser.add_argument("--gpu-memory-gib", type=float)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--what", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    own, rest = parser.parse_known_args(argv)
    for name in ("num_gpus", "num_cpus", "gpu_memory_gib"):
        value = getattr(own, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"slime plan: --{name.replace('_', '-')} {value:g} must be a number, not negative")
    if own.what and own.trace is None:
        raise ConfigError("slime plan: --what needs --trace RUN, the run directory of a recorded run")
    answer: dict[str, Any] = {}
    lines: list[str] = []
    if rest:
        memory = own.gpu_memory_gib * 2**30 if own.gpu_memory_gib else None
        plan = _plan(rest, own.num_gpus, own.num_cpus, memory)
        answer = plan.to_dict()
        lines += plan.describe(memory)
    if own.trace is not None:
        predicted, table = _predict(own.trace, own.what)
        answer["trace"] = predicted
        lines += [*([""] if lines else []), f"prediction from {own.trace}", *table]
    print(json_text(answer, indent=2) if own.json else "\n".join(lines))
    return 0


def _plan(rest: list[str], num_gpus: int | None, num_cpus: float | None, gpu_bytes: float | None) -> Any:
    if not rest[0].startswith("-"):
        rest = ["--config", *rest]
    if not any(word.split("=")[0] in ("--config", "--hf-checkpoint") for word in rest):
        named = [after for word, after in pairwise(rest) if word == "--model"]
        rest += [word for name in named[-1:] for word in ("--hf-checkpoint", name)]
    from slime_commands.plan.run_plan import plan_run
    from slime_core.plugins.discovery import search_as
    from slime_core.plugins.presets import load_settings

    settings = load_settings(rest, command="train", fetch=False)
    search_as(settings.args)
    if settings.args.device == "cpu":
        num_gpus = 0
    elif num_gpus is None:
        import torch

        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return plan_run(settings, num_gpus=num_gpus, num_cpus=num_cpus, gpu_bytes=gpu_bytes)


def _predict(trace: Path, whats: list[str]) -> tuple[dict[str, Any], list[str]]:
    from slime_commands.plan.predict import describe, predictions, to_dict
    from slime_commands.plan.workload import read_workload

    workload, recorded = read_workload(trace)
    found = predictions(workload, recorded, whats)
    return to_dict(workload, recorded, found), describe(recorded, found)


command = Command(run, only_prints=True)
