"""`slime push RUN org/name` (serve): upload a run's model to the Hugging Face hub, with a card of its facts."""

from __future__ import annotations

import argparse
from typing import Any

from slime_runs.export_command import MODELS

from slime_core.protocols import Command
from slime_core.text import json_text, plain


def add_parser(subparsers: Any) -> None:
    """Define `slime push`."""
    text = "upload a run's model to the Hugging Face hub, with a card of the run's facts"
    parser = subparsers.add_parser("push", help=text, description=f"{text}; the token is HF_TOKEN of the environment")
    parser.add_argument("run", metavar="RUN", help="run directory; nothing is written into it")
    parser.add_argument("repo", metavar="org/name", help="repository; created if it does not exist")
    parser.add_argument("--step", type=int, metavar="N", help="the commit after N rollouts (default: the newest)")
    parser.add_argument("--adapter", metavar="NAME", help="an adapter of --lora-adapters (default: the shared one)")
    text = "whole weights (the default), adapters of --lora-rank, or a GGUF file"
    parser.add_argument("--format", choices=MODELS, default="merged", help=text)
    parser.add_argument("--private", action="store_true", help="create it as a private repository")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="write to a repository that slime push has not made; replace its weights",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(namespace: argparse.Namespace) -> int:
    """Upload, and print the commit. Raises ConfigError, SlimeError."""
    from dataclasses import asdict

    from slime_runs.numbering import stored_rollout
    from slime_runs.run import Run

    from slime_hub.push import push

    done = push(
        Run(namespace.run),
        namespace.repo,
        step=stored_rollout("--step", namespace.step),
        adapter=namespace.adapter,
        form=namespace.format,
        private=namespace.private,
        overwrite=namespace.overwrite,
    )
    said = f"{done.url}\ncommit {done.commit}: {', '.join(done.files)}\n{done.proof}"
    print(json_text(asdict(done)) if namespace.json else plain(said))
    return 0


command = Command(run, add_parser)
