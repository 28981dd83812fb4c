"""`slime resample RUN SAMPLE` (look at a run): generate a stored sample again, as it was or with something changed."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.protocols import Command
from slime_core.text import json_text, plain

if TYPE_CHECKING:
    from slime_runs.resample import Again, Change, Resampled
    from slime_runs.run import Run


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Define `slime resample`."""
    text = "generate a stored sample again, as it was or with something changed"
    parser = subparsers.add_parser(
        "resample",
        help=text,
        description="Generate a stored sample again with the run's embedded engine, seeds and kept weights, and compare"
        " it token for token. Exit status 1: nothing was changed, and other tokens came out.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory; nothing is written into it")
    parser.add_argument("sample", type=int, metavar="SAMPLE", help="its number, as slime samples show has it")
    parser.add_argument(
        "--rollout", type=int, metavar="N", help="of this rollout (the first is 1), if several have the number"
    )
    parser.add_argument("--eval", metavar="NAME", dest="data_set", help="of an evaluation's data set")
    parser.add_argument("--from-token", type=int, default=0, metavar="N", help="keep the first N response tokens")
    parser.add_argument("--weights", type=int, metavar="STEP", help="those after STEP rollouts; 0: of the beginning")
    parser.add_argument("--temperature", type=float, metavar="X")
    parser.add_argument("--top-p", type=float, metavar="X")
    parser.add_argument("--top-k", type=int, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="response tokens, those kept included")
    parser.add_argument("--tool-answer", metavar="FILE", help="in the place of the first tool's answer from there on")
    parser.add_argument("--times", type=int, default=1, metavar="K", help="so many, all but the first with other seeds")
    parser.add_argument("--json", action="store_true", help="print one JSON object per sample")


def run(namespace: argparse.Namespace) -> int:
    """Generate and print. Raises RunError, ConfigError, CheckpointError."""
    from slime_core.waits import telling_start
    from slime_runs.index import Filter
    from slime_runs.numbering import stored_rollout
    from slime_runs.run import Run, RunError

    stored_run = Run(namespace.run)
    change = _change(namespace)
    rollout = stored_rollout("--rollout", namespace.rollout, namespace.data_set)
    wanted = Filter(sample_index=namespace.sample, rollout=rollout, data_set=namespace.data_set or "")
    stored = next(stored_run.samples(wanted, limit=1), None)
    if stored is None:
        raise RunError(
            f"{namespace.run}: no sample {namespace.sample} is kept; slime samples show names those that are"
        )
    with telling_start():
        from slime_runs.resample import resample

        (found,) = resample(stored_run, [stored], change)
    _tell(stored_run, found, namespace.json)
    changed = change.params or change.tool_answer is not None or change.step is not None
    return int(not changed and found.found[0].first_difference is not None)


def _change(namespace: argparse.Namespace) -> Change:
    from slime_core.errors import ConfigError
    from slime_runs.resample import Change

    if namespace.times < 1:
        raise ConfigError(f"--times {namespace.times}: must be at least 1")
    answer = None
    if namespace.tool_answer is not None:
        try:
            answer = Path(namespace.tool_answer).read_text(encoding="utf-8").rstrip("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--tool-answer {namespace.tool_answer}: cannot be read: {error}") from error
    names = ("temperature", "top_p", "top_k", "max_new_tokens")
    params = {name: getattr(namespace, name) for name in names if getattr(namespace, name) is not None}
    return Change(namespace.from_token, namespace.weights, params, answer, namespace.times)


def _tell(run: Run, found: Resampled, as_json: bool) -> None:
    from slime_runs.reading import header, lines

    if as_json:
        for again in found.found:
            print(json_text(_facts(found, again)))
        return
    colour = sys.stdout.isatty()
    weights = found.weights
    print(f"stored: {header(found.stored)}")
    print(plain(f"weights after {weights.step} rollouts, {weights.path}; {found.kept} response tokens kept\n"))
    for again in found.found:
        entry = found.stored.entry._replace(
            score=again.sample.reward if isinstance(again.sample.reward, float) else None,
            status=again.sample.status.value,
            fate="resampled",
            response_tokens=again.sample.response_length,
            trained_tokens=again.sample.effective_response_length,
            failure=None,
        )
        print(_verdict(again))
        shown = replace(found.stored, entry=entry, row=again.sample.to_dict())
        print("\n".join(lines(run, shown, colour=colour)))


def _facts(found: Resampled, again: Again) -> dict[str, Any]:
    return {
        "weights": {"step": found.weights.step, "version": found.weights.version, "path": str(found.weights.path)},
        "kept": found.kept,
        "first_difference": again.first_difference,
        "log_prob_distance": again.distance,
        "sample": again.sample.to_dict(),
    }


def _verdict(again: Again) -> str:
    bits = "log-probs bit for bit" if again.distance == 0.0 else f"log-probs within {again.distance:.1e}"
    if again.first_difference is None:
        return f"as it is stored: {again.sample.response_length} tokens id for id, {bits}"
    return f"as it is stored up to token {again.first_difference}, {bits} so far"


command = Command(run, add_parser)
