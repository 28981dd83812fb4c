"""`slime rewards` (data): score saved samples again with another reward, or attack a reward.

`score` scores one answer that is typed on the command line; `attack` looks for wrong answers that a reward pays. Every
setting of `slime train` may follow (`--reward-key`, `--rm-timeout`, `--config`, ...). Exit status 1: something could
not be scored, `--check` found a difference, or the attack something.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from slime_core.plugins.commands import Parser
from slime_core.protocols import Command
from slime_core.text import json_text, plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from slime_core.config import Settings
    from slime_runs.inspect.reward_replay import Outcome, Saved

_SHOWN = 60
"""Maximum characters of a reward or an error in a line of --diff."""
_READ = 500
"""Maximum characters of a response or a label in a line of --diff."""


def run(argv: list[str]) -> int:
    """Find the sub-command."""
    from slime_core.errors import ConfigError

    parser = _parser()
    try:
        namespace, rest = parser.parse_known_args(argv)
    except SystemExit:  # --help has been printed; there are no plugin options to list after it
        return 0
    if namespace.action is None:
        raise ConfigError("slime rewards: say what to do: replay, score or attack (slime rewards --help)")
    return {"replay": _replay, "score": _score, "attack": _attack}[namespace.action](namespace, rest)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="slime rewards", description=__doc__, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", parser_class=Parser)
    replay = actions.add_parser(
        "replay",
        allow_abbrev=False,
        help="score samples of files again",
        description="Score samples of rollout dumps or failures/*.json again. Settings of slime train may follow.",
    )
    replay.add_argument("files", nargs="+", metavar="DUMP", help="run, saved samples, failures/*.json, or a pattern")
    replay.add_argument(
        "--with", dest="specs", action="append", metavar="SPEC",
        help="reward, by name or path; repeat to compare. Default for failures/*.json: the one that failed",
    )  # fmt: skip
    replay.add_argument("--diff", action="store_true", help="print every sample whose reward differs")
    replay.add_argument("--label", metavar="TEXT", help="score against this label instead of the samples' own")
    replay.add_argument("--json", action="store_true", help="print one JSON object")
    replay.add_argument("--check", action="store_true", help="exit status 1 when a reward differs")
    score = actions.add_parser(
        "score",
        allow_abbrev=False,
        help="score one answer",
        description="Score one answer. Settings of slime train may follow.",
    )
    score.add_argument("--with", dest="specs", action="append", metavar="SPEC", required=True, help="reward")
    score.add_argument("--prompt", default="", metavar="TEXT")
    score.add_argument("--response", metavar="TEXT", help="default: standard input")
    score.add_argument("--label", metavar="TEXT")
    score.add_argument("--metadata", default="{}", metavar="JSON")
    score.add_argument("--json", action="store_true", help="print one JSON object per reward")
    attack = actions.add_parser(
        "attack",
        allow_abbrev=False,
        help="look for wrong answers that a reward pays",
        description="Send a reward denied, hedged, listed, retracted, empty and huge answers, injections and the right"
        " answer in several spellings, and print what it pays and must not, and the reverse. Settings of slime train"
        " may follow.",
    )
    attack.add_argument("spec", metavar="REWARD", help="name, pkg.mod:attr or file.py, as for --custom-rm-path")
    attack.add_argument("--data", metavar="FILE", help="rows with labels; default: made ones")
    attack.add_argument("--rows", type=int, default=8, metavar="N", help="rows of the file, spread over it (default 8)")
    attack.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _attack(namespace: argparse.Namespace, rest: Sequence[str]) -> int:
    from slime_core.errors import ConfigError
    from slime_runs.inspect.attacked_reward import attack, cases_of, show

    if namespace.rows < 1:
        raise ConfigError(f"slime rewards attack: --rows {namespace.rows}: must be at least 1")
    settings = _settings(rest)
    cases = cases_of(settings, namespace.data, namespace.rows)
    report = attack(settings, namespace.spec, "slime rewards attack", cases, made=namespace.data is None)
    if namespace.json:
        print(json_text({"reward": namespace.spec, **report.as_json()}, indent=2))
    else:
        show(namespace.spec, report)
    return int(bool(report.false_passes or report.false_fails or report.errors))


def _replay(namespace: argparse.Namespace, rest: Sequence[str]) -> int:
    from slime_core.errors import ConfigError
    from slime_runs.inspect.reward_replay import read_saved

    settings = _settings(rest)
    files = read_saved(namespace.files)
    if not namespace.specs and any(saved.spec is None for saved in files):
        dump = next(saved.path for saved in files if saved.spec is None)
        raise ConfigError(f"slime rewards replay: {dump} is a rollout; say which reward: --with SPEC")
    for saved in files:
        _take_saved_settings(settings, saved.args)
    specs = namespace.specs or list(dict.fromkeys(saved.spec for saved in files if saved.spec is not None))
    results = {}
    for spec, outcomes in asyncio.run(_rescored(settings, specs, files, bool(namespace.specs), namespace.label)):
        results[spec] = outcomes
    return _report(namespace, settings.args.reward_key, files, results)


def _score(namespace: argparse.Namespace, rest: Sequence[str]) -> int:
    from pathlib import Path

    from slime_core.errors import ConfigError
    from slime_core.sample import Sample, SampleStatus
    from slime_runs.inspect.reward_replay import Saved

    settings = _settings(rest)
    response = sys.stdin.read() if namespace.response is None else namespace.response
    try:
        metadata = json.loads(namespace.metadata)
    except ValueError as error:
        raise ConfigError(f"slime rewards score: --metadata is no JSON: {error}") from None
    if not isinstance(metadata, dict):
        raise ConfigError(f"slime rewards score: --metadata {namespace.metadata:.80}: must be a JSON object")
    sample = Sample(
        index=0, group_index=0, prompt=namespace.prompt, response=response, label=namespace.label,
        metadata=metadata, status=SampleStatus.COMPLETED,
    )  # fmt: skip
    status = 0
    saved = [Saved(Path("-"), [sample])]
    for spec, outcomes in asyncio.run(_rescored(settings, namespace.specs, saved, True, None)):
        (outcome,) = outcomes
        if namespace.json:
            print(json_text({"reward": spec, "score": outcome.new, "error": outcome.error}))
        else:
            shown = f"failed: {outcome.error}" if outcome.error else json.dumps(outcome.new, default=str)
            print(plain(shown if len(namespace.specs) == 1 else f"{spec}  {shown}"))
        status = status or int(outcome.error is not None)
    return status


def _settings(argv: Sequence[str]) -> Settings:
    """Load the settings of the rest of the command line, with their plugins registered."""
    from slime_core.config import load_settings
    from slime_core.plugins.manager import build_manager

    settings = load_settings(list(argv), command="show")
    build_manager(settings.args)
    return settings


def _take_saved_settings(settings: Settings, saved: Mapping[str, Any]) -> None:
    """Apply the settings of the failed score, except those given on the command line."""
    for name, value in saved.items():
        if name not in settings.origins or not settings.is_given(name):
            setattr(settings.args, name, value)


async def _rescored(
    settings: Settings, specs: Sequence[str], files: Sequence[Saved], all_files: bool, label: str | None
) -> list[tuple[str, list[Outcome]]]:
    """Return the outcomes of each reward; without `all_files` a reward scores only its own failures."""
    from slime_core.launch.components import Resolver
    from slime_core.rollout.reward import RewardStage
    from slime_runs.inspect.reward_replay import rescore

    settings.args.run_dir = None  # failures here are printed, not saved
    resolver = Resolver(settings)
    found = []
    try:
        for spec in specs:
            scorer = resolver.reward(spec, "--with" if all_files else "the failed score")
            stage = RewardStage(settings.args, scorer, resolver.reward)
            await stage.start()
            own = [saved for saved in files if all_files or saved.spec == spec]
            parts = [await rescore(stage, scorer, saved, label=label) for saved in own]
            found.append((spec, [outcome for part in parts for outcome in part]))
    finally:
        resolver.close()
    return found


def _report(
    namespace: argparse.Namespace, key: str | None, files: Sequence[Saved], results: Mapping[str, list[Outcome]]
) -> int:
    from slime_runs.inspect.reward_replay import summary

    totals, several = {}, len(results) > 1
    for spec, outcomes in results.items():
        own = [saved for saved in files if namespace.specs or saved.spec == spec]
        totals[spec] = summary(outcomes, sum(len(saved.samples) for saved in own), key)
    if namespace.json:
        shown = {
            spec: {**totals[spec], "outcomes": [vars(o) for o in outcomes if o.differs or not namespace.diff]}
            for spec, outcomes in results.items()
        }
        print(json_text(shown, indent=2))
    else:
        for spec, outcomes in results.items():
            if several:
                print(f"{spec}:")
            for outcome in outcomes:
                if outcome.error is not None or (namespace.diff and outcome.differs):
                    print(plain(_line(outcome, several_files=len(files) > 1)))
                    if namespace.diff:
                        print(_text(outcome))
            print(_summary_line(totals[spec]))
    failed = any(total["failed"] for total in totals.values())
    return int(failed or (namespace.check and any(total["changed"] for total in totals.values())))


def _line(outcome: Outcome, several_files: bool) -> str:
    place = f"{outcome.file}: " if several_files else ""
    old = "none" if outcome.old is None else json.dumps(outcome.old, default=str)
    new = f"failed: {outcome.error}" if outcome.error else json.dumps(outcome.new, default=str)
    return f"{place}sample {outcome.index}: {old[:_SHOWN]} -> {new if outcome.error else new[:_SHOWN]}"


def _text(outcome: Outcome) -> str:
    from slime_runs.text import one_line

    label = "" if outcome.label is None else f"  label: {one_line(str(outcome.label), _READ)}\n"
    return f"{label}  response: {one_line(outcome.response, _READ)}"


def _summary_line(total: Mapping[str, Any]) -> str:
    parts = [f"{total['scored']} of {total['samples']} samples scored, {total['changed']} changed"]
    if total["mean_old"] is not None:
        parts.append(f"mean {total['mean_old']:.4f} -> {total['mean_new']:.4f}")
    if total["failed"]:
        parts.append(f"{total['failed']} failed")
    if total["left_out"]:
        parts.append(f"{total['left_out']} left out (their generation failed)")
    return ", ".join(parts)


command = Command(run, only_prints=True)
