"""Pages of runs as JSON: the list, a comparison, one run, its timeline, an evaluation over time, a prompt's visits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from slime_core.checkpoint.run_dir import CONFIG
from slime_core.text import plain
from slime_runs import profile, shadows
from slime_runs.compare import compare
from slime_runs.files import FOLDER, file_names, parse_name
from slime_runs.index import Entry, Filter, Index, Key, Order, Total
from slime_runs.overview import CURVES, PARTS, evaluations, names_of
from slime_runs.reading import question, tokenizer_of
from slime_runs.run import PROFILE, differences
from slime_runs.timeline import FILE as TIMELINE
from slime_runs.trace import bounds
from slime_runs.view.samples_page import columns
from slime_runs.view.watched import UnreadableError, WatchedRun, readable, stamp

_NEWEST = 200
"""Number of newest engine events and stall reports on a page."""
_MOST_BARS = 4000
_MOST_SCORES = 30_000
_MOST_VISITS = 50
_MOST_DISAGREED = 500
_ENDS, _NEAR = 3, 24


def runs(watched: Mapping[str, WatchedRun]) -> dict[str, Any]:
    """Return the list of runs, and the settings in which they differ."""
    facts = []
    for name, run in watched.items():
        try:
            with run.lock, readable(run):
                facts.append({"run": name, **_facts(run)})
        except UnreadableError as error:
            facts.append({"run": name, **_NOTHING, "path": str(run.path), "unreadable": plain(str(error), 1000)})
    return {"runs": facts, "settings": differences(list(watched.values())) if len(watched) > 1 else {}}


_NOTHING: dict[str, Any] = {
    "state": "unreadable", "began": None, "changed": None, "done": 0, "of": None, "model": None, "reward": None,
    "curve": [], "evaluations": {}, "incidents": 0, "shadowed": False, "last_rollout": None, "note": "",
}  # fmt: skip
"""Facts of a run that cannot be read."""


def _facts(run: WatchedRun) -> dict[str, Any]:
    metrics, settings = run.metrics(), run.settings()
    # A copied run keeps the times of its trace; the times of its files may be those of the copy.
    began, changed = bounds(run.path / TIMELINE) or (_changed(run.path / CONFIG), _changed(run.path / "metrics.jsonl"))
    rewards = [(line["step"], line["rollout/raw_reward"]) for line in metrics if "rollout/raw_reward" in line]
    # The index is not used, since it holds a run's samples in memory and the list may contain many runs.
    kept = (parse_name(name) or (0, True) for name in reversed(file_names(run.path / FOLDER)))
    return {
        "path": str(run.path),
        "state": run.state(),
        "began": began,
        "changed": changed,
        "done": max((line["step"] for line in metrics), default=0),
        "of": None if run.is_evaluation() else settings.get("num_rollout", (None, ""))[0],
        "model": settings.get("hf_checkpoint", (None, ""))[0],
        "reward": rewards[-1][1] if rewards else None,
        "curve": rewards[:: len(rewards) // 100 + 1],
        "evaluations": {name: [found[0][1], found[-1][1]] for name, found in evaluations(metrics).items() if found}
        or {name: [value, value] for name, value in run.scores().items()},
        "incidents": len(run.incidents()),
        "note": run.note(),
        "shadowed": any(name.startswith("shadow_") and value[0] for name, value in settings.items()),
        "last_rollout": next((rollout for rollout, evaluation in kept if not evaluation), None),
    }


def _changed(path: Path) -> float | None:
    """Return the Unix time at which a file was last written; None if it is missing."""
    state = stamp(path)
    return None if state is None else state[0] / 1e9


def compared(watched: Mapping[str, WatchedRun]) -> dict[str, Any]:
    """Return the differences of the runs, and the metrics of their curves."""
    found = list(watched.values())
    paths = {str(run.path): name for name, run in watched.items()}
    made = compare(found)
    made["groups"] = [[paths[path] for path in group] for group in made["groups"]]
    return {**made, "curves": _own_curves(found), "metric_names": sorted(set().union(*map(_names, found)))}


def _curves(found: Sequence[WatchedRun]) -> dict[str, str]:
    sets = {name for run in found for name in evaluations(run.metrics())}
    parts = {n.removeprefix(PARTS) for run in found for n in names_of(run.metrics()) if n.startswith(PARTS)}
    of_parts = {f"reward: {name}": f"{PARTS}{name}" for name in sorted(parts)}
    return {**CURVES, **{f"evaluation of {name}": f"eval/{name}" for name in sorted(sets)}, **of_parts}


def _own_curves(found: Sequence[WatchedRun]) -> dict[str, str]:
    """Return the curves for which any of the runs has metrics."""
    names = set().union(*map(_names, found))
    return {title: name for title, name in _curves(found).items() if name in names}


def _names(run: WatchedRun) -> set[str]:
    return names_of(run.metrics())


def run_page(run: WatchedRun) -> dict[str, Any]:
    """Return the page of one run: its facts, waits, incidents, rollouts and evaluations."""
    seen = run.stamp()  # taken first, so data that the run writes meanwhile is new at the next poll
    run.read_ahead()
    index = run.index()
    both = ends(index)
    return {
        **_facts(run),
        "stamp": seen,
        "curves": _own_curves([run]),
        "metrics": sorted(_names(run)),
        "settings": [[name, value, origin] for name, (value, origin) in run.settings().items()],
        "plugins": run.plugins(),
        "summary": run.summary(),
        "profiled": (run.path / PROFILE).is_file(),
        "waits": waits(run),
        "noticed": run.incidents(),
        "parts": run.parts(),
        "stalls": [path.name for path in run.stalls()[-_NEWEST:]],
        "engine_events": run.events()[-_NEWEST:],
        "stored": {"samples": index.size(), "bytes": index.total_bytes()},
        "rollouts": _totals(index.rollouts()),
        "evaluated": _totals(index.evaluations()),
        "best": columns(both["best"]),
        "worst": columns(both["worst"]),
        "evaluation": run.evaluation(),
    }


def ends(index: Index) -> dict[str, list[Entry]]:
    """Return the "best" and the "worst" samples, none twice: of training, or of evaluations if there are no others."""
    wanted = Filter(data_set="") if index.rollouts() else Filter()
    best = _ends(index, wanted, "best")
    return {"best": best, "worst": [entry for entry in _ends(index, wanted, "worst") if entry not in best]}


def _ends(index: Index, wanted: Filter, order: Order) -> list[Entry]:
    """Return the first three in this order, of different prompts where it has several near its beginning."""
    entries = index.find(wanted, order=order, limit=_NEAR)
    first_of = {entry.group_index: entry for entry in reversed(entries)}.values()
    chosen = [entry for entry in entries if entry in first_of]
    return [*chosen, *(entry for entry in entries if entry not in chosen)][:_ENDS]


def _totals(totals: Sequence[Total]) -> dict[str, list[Any]]:
    return {name: [getattr(total, name) for total in totals] for name in Total._fields}


def waits(run: WatchedRun) -> dict[str, Any]:
    """Return the report of `slime why`."""
    report = run.waits()
    return {
        "alive": report.alive,
        "overdue": report.overdue,
        "processes": [
            {
                "role": str(p.board.get("role")),
                "name": p.name,
                "state": p.words,
                "waits": [{**row, "age": row["age"] + p.silence} for row in p.waits[:50]],
            }
            for p in report.processes
        ],
        "unreadable": [path.name for path in report.unreadable],
    }


def profiled(run: WatchedRun) -> dict[str, Any]:
    """Return the time profile as in `slime show`; "trace" is the size of the Perfetto file, or None."""
    found = profile.profile(run)
    trace = stamp(run.path / PROFILE)
    return {
        "seconds": found["seconds"],
        "rollouts": found["rollouts"],
        "rows": profile.rows(found) if found["seconds"] else [],
        "advice": found["advice"],
        "trace": None if trace is None else trace[1],
    }


def metrics(run: WatchedRun, names: Sequence[str], since: int, *, times: bool = False) -> dict[str, Any]:
    """Return metric columns for steps after `since`, by default those of the run's page; missing numbers are None.

    "errors" has the standard errors of metrics that have them, and "seconds", with `times`, the seconds from the start
    of the run to the end of each step.
    """
    names = names or list(_own_curves([run]).values())
    lines, known = [line for line in run.metrics() if line["step"] > since], _names(run)
    errors = {name: f"{name}-stderr" if f"{name}-stderr" in known else f"{name}_stderr" for name in names}
    found: dict[str, Any] = {
        "step": [line["step"] for line in lines],
        "columns": {name: _column(lines, name) for name in names},
        "errors": {name: _column(lines, error) for name, error in errors.items() if error in known},
    }
    return found | ({"seconds": _seconds(run, found["step"])} if times else {})


def _column(lines: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    return [_finite(line.get(name)) for line in lines]


def _seconds(run: WatchedRun, steps: Sequence[int]) -> list[float | None]:
    """Return the end of each step in seconds since the run began; None if the timeline does not say."""
    run.timeline.update()
    events = [event for event in run.timeline.stages if isinstance(event.get("r"), int) and event["e"] != "eval"]
    began = min((first for first, _ in run.parts()), default=None)
    if began is None:
        began = min((event["t"][0] for event in events), default=0.0)
    ends = {0: 0.0}
    for event in events:
        ends[event["r"] + 1] = max(ends.get(event["r"] + 1, 0.0), event["t"][-1] - began)
    return [ends.get(step) for step in steps]


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def timeline(run: WatchedRun, number: int) -> dict[str, Any]:
    """Return the stages and samples of one rollout, in seconds since its first event, and the waits of its samples."""
    events = run.timeline.events(number)
    if not events:
        return {"rollout": number, "start": None, "stages": [], "samples": [], "cut": False}
    start = min(event["t"][0] for event in events)
    samples = [event for event in events if event["e"] == "sample"]
    return {
        "rollout": number,
        "start": start,
        "stages": [
            {"what": event["e"], "from": event["t"][0] - start, "to": event["t"][-1] - start, "rank": event.get("rank")}
            for event in events
            if event["e"] not in ("sample", "run")
        ],
        "samples": [
            {
                "group": event.get("g"), "sample": event.get("i"), "times": [t - start for t in event["t"]],
                "prompt": event.get("p"), "before": event.get("k"), "new": event.get("n"), "turns": event.get("turns"),
                "status": event.get("s"), "version": event.get("v"), "evaluation": bool(event.get("ev")),
                "waited": event.get("w", 0.0), "outside": event.get("o", 0.0),
            }
            for event in samples[:_MOST_BARS]
        ],
        "cut": len(samples) > _MOST_BARS,
    }  # fmt: skip


def shadow(run: WatchedRun, most: int = _MOST_DISAGREED) -> dict[str, Any]:
    """Compare shadow components with the run's own: agreement, rank correlation, cost, and the newest disagreements."""
    told = shadows.newest_disagreements(run, most)
    entries: dict[tuple[int, Key], Entry] = {}
    for rollout in {rollout for rollout, _, _ in told}:
        of_rollout = run.index().find(Filter(rollout=rollout, data_set=""))
        entries |= {(rollout, entry.key): entry for entry in of_rollout}
    shown = [(entries[n, key], row) for n, key, row in told if (n, key) in entries]
    return {
        "specs": shadows.summary(run),
        "columns": {
            **columns([entry for entry, _ in shown]),
            "rewards": [row["rewards"] for _, row in shown],
            "filters": [row["filters"] for _, row in shown],
            "kept": [row["kept"] for _, row in shown],
        },
    }


def evaluation(run: WatchedRun, data_set: str) -> dict[str, Any]:
    """Return each item's mean score in every evaluation (None without a score), its flips, and where its text is."""
    seen, rows = run.stamp(), run.index().scores(data_set, limit=_MOST_SCORES)
    if len(rows) == _MOST_SCORES:  # the oldest evaluation is incomplete
        rows = [row for row in rows if row[0] != rows[-1][0]]
    columns = sorted({row[0] for row in rows})
    place = {number: at for at, number in enumerate(columns)}
    found: dict[Any, tuple[list[float | None], list[int | None]]] = {}
    for number, item, index, score in rows:
        if item not in found:
            found[item] = ([None] * len(columns), [None] * len(columns))
        scores, samples = found[item]
        scores[place[number]], samples[place[number]] = score, index
    items: list[dict[str, Any]] = [
        {"item": item, "scores": scores, "samples": samples, "flips": _flips(scores)}
        for item, (scores, samples) in sorted(found.items(), key=lambda pair: (pair[0] is None, pair[0]))
    ]
    newest = Filter(rollout=columns[-1] if columns else None, data_set=data_set)
    places = {entry.sample_index: _place(entry) for entry in run.index().find(newest, limit=_MOST_SCORES)}
    for row in items:
        row["at"] = places.get(row["samples"][-1])
    return {"data_set": data_set, "rollouts": columns, "items": items, "stamp": seen}


def _place(entry: Entry) -> str:
    """Return the address of a sample for `samples_page.texts`."""
    return f"{entry.rollout}.{int(entry.data_set is not None)}.{entry.offset}.{entry.size}.{entry.place}"


def _flips(scores: Sequence[float | None]) -> int:
    known = [score for score in scores if score is not None]
    return sum(a != b for a, b in pairwise(known))


def prompt(run: WatchedRun, row: int) -> dict[str, Any]:
    """Return all visits to one row of the training data, in order."""
    entries = run.index().find(Filter(data_row=row, data_set=""), limit=100 * _MOST_VISITS)
    told = run.ledger.groups_of(row)
    order = dict.fromkeys([*told, *sorted({e.group_index for e in entries if e.group_index is not None})])
    shown = list(order)[-_MOST_VISITS:]
    events = run.ledger.events(shown)
    by_group: dict[Any, list[Entry]] = {}
    for key, members in groupby(sorted(entries, key=lambda e: e.group_index or 0), lambda e: e.group_index):
        by_group[key] = list(members)
    found = next(run.stored(entries[:1]), None)
    return {
        "row": row,
        "text": None if found is None else plain(question(found.row, tokenizer_of(run)), 2000),
        "visits": [_visit(group, by_group.get(group, []), events[group]) for group in shown],
        "left_off": len(order) - len(shown),
    }


def _visit(group: int, entries: Sequence[Entry], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "group": group,
        "rollout": entries[0].rollout if entries else None,
        "scores": [entry.score for entry in entries],
        "fates": dict(Counter(entry.fate for entry in entries)),
        "events": events,
    }


def pulse(run: WatchedRun) -> dict[str, Any]:
    """Return state and stamp of the run, by which a page notices new data."""
    return {"state": run.state(), "stamp": run.stamp()}
