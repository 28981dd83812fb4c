"""`slime export RUN` (look at a run): write a run's samples, metrics or model in the format of another tool.

`merged`, `peft` and `gguf` write the model of a commit, and compare its logits with the trainer's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.protocols import Command
from slime_core.text import json_text, plain

if TYPE_CHECKING:
    from slime_runs.run import Run

MODELS = ("merged", "peft", "gguf")
"""Formats of the model; the others are of samples, evaluations and metrics."""
FORMATS = ("hf", "inspect", "otel", "perfetto", "trackio", *MODELS)
_TO_FOLDER = ("hf", "inspect", "perfetto", *MODELS)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Define `slime export`."""
    text = "a run's samples, evaluations, traces, metrics or model in the form of another tool"
    parser = subparsers.add_parser("export", help=text, description=text)
    parser.add_argument("run", metavar="RUN", help="run directory; nothing is written into it")
    parser.add_argument("--format", required=True, choices=FORMATS, help="which tool's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    of_model = f"of {', '.join(MODELS)}: "
    parser.add_argument("--step", type=int, metavar="N", help=f"{of_model}the commit after N rollouts (the newest)")
    parser.add_argument("--adapter", metavar="NAME", help=f"{of_model}an adapter of --lora-adapters (the shared one)")
    dtypes = ("float32", "float16", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, help=f"{of_model}dtype of the weights (the commit's)")
    more = "largest difference to the trainer's logits (a share of the largest logit, by dtype)"
    parser.add_argument("--limit", type=float, metavar="X", help=f"{of_model}{more}")
    parser.add_argument("-o", "--output", metavar="DIR", help=f"new directory; for {', '.join(_TO_FOLDER)}")


def run(namespace: argparse.Namespace) -> int:
    """Write, and say what. Raises RunError, ConfigError."""
    from slime_core.errors import ConfigError
    from slime_runs import export
    from slime_runs.new_directory import check_new, new_directory
    from slime_runs.run import Run

    found = Run(namespace.run)
    if namespace.format in _TO_FOLDER and not namespace.output:
        raise ConfigError(f"slime export --format {namespace.format} needs -o DIR")
    if namespace.format in ("otel", "trackio") and namespace.output:
        raise ConfigError(f"slime export --format {namespace.format} sends, and writes no -o {namespace.output}")
    named = [name for name in ("step", "adapter", "dtype", "limit") if getattr(namespace, name) is not None]
    if named and namespace.format not in MODELS:
        raise ConfigError(f"slime export --{named[0]} is for --format {', '.join(MODELS)}; leave it out")
    if namespace.limit is not None and not namespace.limit >= 0:
        raise ConfigError(f"slime export --limit {namespace.limit:g}: must be a number, not negative")
    if namespace.format in MODELS:
        said = _model(namespace, found)
    elif namespace.output:
        to_folder = {"hf": export.to_hf, "inspect": export.to_inspect, "perfetto": export.to_perfetto}
        target = Path(namespace.output)
        check_new(target, f"-o {target}:")
        with new_directory(target) as partial:
            said = to_folder[namespace.format](found, partial)
        said = f"{said} -> {target}"
    else:
        said = (export.to_trackio if namespace.format == "trackio" else export.to_otel)(found)
    facts = {"format": namespace.format, "output": namespace.output, "wrote": said}
    print(json_text(facts) if namespace.json else plain(said))
    return 0


def _model(namespace: argparse.Namespace, found: Run) -> str:
    from slime_runs.models.commit import Commit
    from slime_runs.models.written import write_model
    from slime_runs.numbering import stored_rollout

    commit = Commit(found, stored_rollout("--step", namespace.step), namespace.adapter)
    target = Path(namespace.output)
    proof = write_model(commit, target, namespace.format, dtype=namespace.dtype, limit=namespace.limit)
    return f"{commit.path} -> {target}: {proof}"


command = Command(run, add_parser)
