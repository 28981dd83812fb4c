"""`slime samples show`: what the model wrote in a run, sample by sample."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from slime_core.text import json_text

if TYPE_CHECKING:
    from slime_runs.run import Run


def add_parser(commands: Any) -> None:
    """Define the sub-command."""
    text = "read what the model wrote in a run: best, worst, failed, one group, or a text"
    parser = commands.add_parser("show", help=text, description=text)
    parser.add_argument("run", metavar="RUN", help="run directory; the run may be going on")
    parser.add_argument(
        "--rollout", type=int, metavar="N", help="of this rollout, the first is 1; with --eval, after N rollouts"
    )
    parser.add_argument("--group", type=int, metavar="ID", help="all answers to one prompt")
    parser.add_argument("--eval", metavar="NAME", dest="data_set", help="of an evaluation's data set")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--best", action="store_true", help="highest reward first")
    chosen.add_argument("--worst", action="store_true", help="lowest reward first")
    chosen.add_argument("--failed", action="store_true", help="those that failed, with the reason")
    parser.add_argument("--dropped", action="store_true", help="of groups that were not trained on")
    parser.add_argument("--disagree", action="store_true", help="on which a shadow component differs")
    parser.add_argument("--grep", metavar="TEXT", help="with this text in prompt or response, in any case")
    parser.add_argument("-n", type=int, default=5, metavar="N", help="so many (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per sample, as it is stored")


def what_is_kept(run: Run) -> str:
    """Name the rollouts and evaluations whose samples are kept."""
    from slime_runs.index import Filter
    from slime_runs.numbering import shown_number

    everything = list(run.index().find(Filter(), order="rollout", limit=-1))
    rollouts = sorted({entry.rollout for entry in everything if not entry.data_set})
    sets = sorted({entry.data_set for entry in everything if entry.data_set})
    kept = [f"rollouts {shown_number(rollouts[0])} to {shown_number(rollouts[-1])}"] if rollouts else []
    kept += [f"evaluations: {', '.join(f'--eval {name}' for name in sets)}"] if sets else []
    return f"{len(everything)} are kept, of {' and of '.join(kept)}" if everything else "none is kept"


def run(namespace: argparse.Namespace) -> int:
    """Print; exit status 1 where none is found. Raises RunError."""
    from slime_runs import Run
    from slime_runs.index import Filter
    from slime_runs.numbering import stored_rollout
    from slime_runs.reading import lines
    from slime_runs.shadows import disagreements

    found_run = Run(namespace.run)
    wanted = Filter(
        rollout=stored_rollout("--rollout", namespace.rollout, namespace.data_set),
        group_index=namespace.group,
        data_set=namespace.data_set or "",
        fate="dropped" if namespace.dropped else None,
        status="failed" if namespace.failed else None,
    )
    count = 0
    wanted_ones = disagreements(found_run) if namespace.disagree else None
    for sample in found_run.samples(
        wanted,
        order="best" if namespace.best else "worst" if namespace.worst else "rollout",
        limit=None if namespace.disagree else namespace.n,
        text=namespace.grep,
    ):
        if wanted_ones is not None and (sample.entry.rollout, sample.entry.key) not in wanted_ones:
            continue
        if count == namespace.n:
            break
        count += 1
        if namespace.json:
            print(json_text(sample.row))
        else:
            print("\n".join(lines(found_run, sample, colour=sys.stdout.isatty())))
    if not count:
        print(f"no sample of the run is like that; {what_is_kept(found_run)}", file=sys.stderr)
    return int(not count)
