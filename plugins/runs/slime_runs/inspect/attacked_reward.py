"""Run `reward_attack.audit` on the reward of a spec and settings, with the run's own rows or synthetic rows.

Called by `slime rewards attack` and by `slime check` (a hook plugin that every run loads, so it imports on demand).
Plain rewards run in worker processes, so a reward that ends its process does not end the audit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime_core import hookimpl
from slime_core.text import plain

if TYPE_CHECKING:
    from slime_core.config import Settings
    from slime_core.plugins.adapters import RewardCaller
    from slime_core.protocols.command import Finding
    from slime_core.sample import Sample
    from slime_runs.inspect.attack_answers import Case
    from slime_runs.inspect.reward_attack import Report, Score

CALL_DEADLINE = 10.0
"""Seconds per call, if `--rm-timeout` is not given."""
_CHECK_DEADLINE = 20.0
"""Seconds for the attack in `slime check`."""
_CHECKED_ROWS = 4


def cases_of(settings: Settings, data: str | None, count: int) -> list[Case]:
    """Return the cases of up to `count` rows, spread over the file; synthetic cases without a file.

    Raises:
        DataError: The file cannot be read, or no row has a right answer.
    """
    from slime_data.layouts import recognise

    from slime_core.data.dataset import column, open_rows
    from slime_core.errors import DataError
    from slime_runs.inspect.attack_answers import case_of, made_cases

    if data is None:
        return made_cases()
    args = settings.args
    rows = open_rows(data, "--data")
    try:
        found = []
        for index in range(0, len(rows), max(1, len(rows) // count)):
            row = rows[index]
            if args.input_key:
                prompt = column(row, args.input_key, "--input-key")
                label = column(row, args.label_key, "--label-key") if args.label_key else row.get("label")
            else:
                prompt, label = recognise(row, args.label_key).read(row)
            metadata = row.get(args.metadata_key or "metadata")
            case = case_of(prompt, label, metadata if isinstance(metadata, dict) else {})
            found += [] if case is None else [case]
    finally:
        rows.close()
    if not found:
        raise DataError(f"--data {data}: none of the rows read has a label to make right and wrong answers of")
    return found[:count]


def attack(
    settings: Settings, spec: str, origin: str, cases: Sequence[Case], *, made: bool, deadline: float | None = None
) -> Report:
    """Audit the reward, in at most `deadline` seconds.

    Raises:
        PluginError, ConfigError: The reward cannot be resolved, or lacks settings.
        TimeoutError: The audit took longer.
    """
    from slime_core.launch.components import Resolver

    settings.args.run_dir = None
    if not settings.is_given("rm_timeout"):
        settings.args.rm_timeout = CALL_DEADLINE
    resolver = Resolver(settings)
    try:
        return asyncio.run(_attacked(resolver.reward(spec, origin), cases, made, deadline))
    finally:
        resolver.close()


async def _attacked(caller: RewardCaller, cases: Sequence[Case], made: bool, deadline: float | None) -> Report:
    from slime_runs.inspect.reward_attack import audit

    async with asyncio.timeout(deadline):
        await caller.start()
        return await audit(scored_by(caller), cases, companions=caller.scores_groups, made=made)


def scored_by(caller: RewardCaller) -> Score:
    """Adapt the caller for an audit: exceptions become text, and a mapping becomes its `--reward-key` number."""

    async def score(samples: list[Sample]) -> list[float | str]:
        try:
            values = await caller.score(samples)
        except Exception as error:  # an error is a result, too
            return [f"{type(error).__name__}: {error}"] * len(samples)
        return [_number(value, caller.args.reward_key) for value in values]

    return score


def _number(value: Any, key: str | None) -> float | str:
    found = value.get(key) if isinstance(value, dict) else value
    return float(found) if isinstance(found, (int, float)) else f"no number under --reward-key {key!r}: {value!r:.80}"


@hookimpl
def slime_check(settings: Settings) -> list[Finding]:
    """Attack the run's reward on rows of the run. Skip rewards that call a service, since calls may cost money."""
    import copy

    from slime_core.plugins.resolve import resolve
    from slime_core.plugins.signatures import is_async
    from slime_core.protocols.command import Finding, Level

    args = settings.args
    spec = args.custom_rm_path or args.rm_type
    if not spec or not args.prompt_data or not args.compute_advantages_and_returns or args.group_rm:
        return []
    by_hand = f"slime rewards attack {spec}"
    found = resolve("rewards", spec, origin="slime check").obj
    if isinstance(found, type) or is_async(found):
        return [Finding("reward", Level.NOTE, f"{spec} may ask a service, so it is not attacked here: {by_hand}")]
    own = copy.copy(settings)
    own.args = copy.copy(args)
    try:
        cases = [case for case in cases_of(own, args.prompt_data, _CHECKED_ROWS) if case.kind != "code"]
        report = attack(own, spec, "slime check", cases, made=False, deadline=_CHECK_DEADLINE) if cases else None
    except TimeoutError:
        why = f"{spec} took more than {_CHECK_DEADLINE:.0f} s"
        return [Finding("reward", Level.NOTE, f"{why}, so it is not attacked here: {by_hand}")]
    except Exception as error:
        return [Finding("reward", Level.NOTE, f"{spec} was not attacked: {type(error).__name__}: {error}")]
    return [] if report is None else [Finding("reward", Level(level), text) for level, text in told(spec, report)]


def told(spec: str, report: Report) -> list[tuple[str, str]]:
    """Return (level, one line) for `slime check`."""
    more = f"slime rewards attack {spec} says more"
    lines = []
    for what, found in (("pays", report.false_passes), ("does not pay", report.false_fails)):
        if found and report.reads_answers:
            first = found[0]
            text = f"{spec} {what} {first.what} answers: {first.response[:60]!a} for label {first.label!r}; {more}"
            lines.append(("warning", text))
    if not report.reads_answers:
        lines.append(("note", f"{spec} pays right and wrong answers alike, or in a form that is not tried; {more}"))
    return lines or [("ok", f"{spec}: {report.calls} answers to {report.rows} rows, no wrong one is paid")]


def show(spec: str, report: Report) -> None:
    """Print the report as text."""
    print(f"{spec}: {report.calls} answers to {report.rows} rows; it reads: {', '.join(report.forms) or 'no form'}")
    for title, found in (
        ("false pass", report.false_passes),
        ("false fail", report.false_fails),
        ("raised", report.errors),
    ):
        for one in found:
            said = one.error or f"reward {one.reward}"
            print(plain(f"{title:<10} {one.what:<12} label {one.label!r:.40}: {one.response!a} -> {said:.200}"))
    counts = {"false passes": report.false_passes, "false fails": report.false_fails, "raised": report.errors}
    print(", ".join(f"{len(found)} {name}" for name, found in counts.items()))
