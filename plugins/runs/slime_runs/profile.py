"""Profile of a run from its timeline and metrics: for `slime show`, and at the end of `slime train --profile`.

In a synchronous run the spans of the loop follow each other and add up to the total. With `--async`, generation runs
at the same time, and the row of rollouts is the time that the trainer waited. Indented rows are parts of the row above,
or overlap with it. If a run was killed and resumed, the time between its parts is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from slime_core.errors import rollout_name
from slime_runs.run import Run
from slime_runs.text import table
from slime_runs.trace import Spans, TraceIndex, joined

STAGES = {"rollout": "rollouts", "train": "training", "push": "weights", "eval": "evaluation", "save": "checkpoints"}
"""Event of the timeline -> row."""
_MOST = 0.5
"""Share of the time above which `_advice` names the setting that decides it."""
_FEWEST = 5
"""Smallest number of rollouts for advice; in shorter runs a final evaluation or commit takes most of the time."""
_FULL_PASS = 4096
"""Default number of tokens of a trainer's pass."""


def profile(run: Run) -> dict[str, Any]:
    """Return the seconds of each stage, as JSON values; "seconds" is 0 without a timeline."""
    told = run.timeline
    told.update()
    parts, spans, passes, events = _read(told)
    total = sum(end - start for start, end in parts)
    seconds = {name: sum(end - start for start, end in spans[name]) for name in STAGES if spans[name]}
    # A long run's timeline stops recording samples, so their shares are not the shares of the whole run.
    whole = told.sampled < 0 or all(event["r"] <= told.sampled for event in events)
    of = (told.generating, told.generating + told.scoring + spans["scored"]) if whole else ([], [])
    generated, scored = (sum(end - start for start, end in joined(one)) for one in of)
    metrics = run.metrics()
    found = {
        "seconds": total,
        "parts": len(parts),
        "rollouts": len({event["r"] for event in events}),
        "stages": seconds,
        "generating": generated,
        "scoring_alone": scored - generated,
        "engine_held": sum(line.get("perf/engine_held_time", 0.0) for line in metrics),
        "passes": passes,
        "async": bool(run.settings().get("async_training", (False, ""))[0]),
    }
    said = [] if whole else [f"generating and scoring are known up to {rollout_name(told.sampled)} alone, and left out"]
    return {**found, "advice": [*said, *_advice(run, found, metrics, events)]}


def _read(told: TraceIndex) -> tuple[Spans, dict[str, Spans], dict[str, float], list[dict[str, Any]]]:
    """Return start and end of each part of the run, spans by event, seconds of rank 0's passes, rollout events."""
    parts: Spans = []
    spans: dict[str, Spans] = defaultdict(list)
    passes: Counter[str] = Counter()
    rollouts = []
    for event in told.stages:
        times = event["t"]
        if event["e"] == "run":
            parts.append((times, times))
            continue
        if "rank" in event:
            passes[event["e"]] += (times[1] - times[0]) * (event["rank"] == 0)
        else:
            spans[event["e"]].append((times[0], times[-1]))
        if event["e"] == "rollout":
            rollouts.append(event)
        if parts:
            parts[-1] = parts[-1][0], max(parts[-1][1], times[-1])
    if parts and told.scoring:  # killed within a rollout
        parts[-1] = parts[-1][0], max(parts[-1][1], told.scoring[-1][1])
    return parts, spans, dict(passes), rollouts


def _advice(
    run: Run, found: Mapping[str, Any], metrics: list[dict[str, Any]], rollouts: list[dict[str, Any]]
) -> list[str]:
    """Return sentences about settings that cost more than half of the time; empty for a short run."""
    total, settings, stages = found["seconds"], run.settings(), found["stages"]
    if found["rollouts"] < _FEWEST or not total:
        return []

    def setting(name: str) -> str:
        value, origin = settings.get(name, (None, ""))
        return f"--{name.replace('_', '-')} {value} ({origin})"

    said = []
    for stage, name, way in (
        ("save", "save_interval", "a larger one saves less often"),
        ("eval", "eval_interval", "a larger one evaluates less often"),
        ("push", "update_weights_interval", "a larger one hands weights over less often"),
    ):
        share = stages.get(stage, 0.0) / total
        if share > _MOST and not found["async"]:
            said.append(f"{STAGES[stage]} took {share:.0%} of the time: {setting(name)}; {way}")
    if found["engine_held"] / total > _MOST:
        share = found["engine_held"] / total
        said.append(
            f"the engine waited {share:.0%} of the time for rewards or tools; --no-deterministic-mode has it go on"
        )
    said += _of_passes(stages.get("train", 0.0) / total, settings, setting("micro_batch_size"), rollouts)
    drawn = sum(event.get("groups_drawn", 0) for event in rollouts)
    dropped = sum(v for line in metrics for n, v in line.items() if n.startswith("rollout/dynamic_filter/drop_"))
    share = stages.get("rollout", 0.0) / total * (dropped / drawn if drawn else 0.0)
    if share > _MOST and not found["async"]:
        said.append(f"groups that were dropped took {share:.0%} of the time: {setting('dynamic_sampling_filter_path')}")
    return said


def _of_passes(
    share: float, settings: Mapping[str, tuple[Any, str]], cited: str, rollouts: list[dict[str, Any]]
) -> list[str]:
    size, origin = settings.get("micro_batch_size", (None, "default"))
    samples, tokens = (sum(event.get(name, 0) for event in rollouts) for name in ("samples", "tokens"))
    given = size is not None and origin != "default" and not settings.get("use_dynamic_batch_size", (False, ""))[0]
    if share <= _MOST or not given or not samples:
        return []
    each = tokens / samples * size
    if each * 8 > _FULL_PASS:
        return []
    return [
        f"training took {share:.0%} of the time, in passes of {each:.0f} tokens: {cited}; without it they have up to"
        f" {_FULL_PASS}, and take less time for each token"
    ]


def rows(found: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return (name, seconds) rows of `profile` in order; the name of a part of the row above begins with two spaces."""
    total = found["seconds"]
    told: list[tuple[str, float]] = []
    for stage, name in STAGES.items():
        if stage in found["stages"]:
            waits = stage == "rollout" and found["async"]
            told.append(("waiting for rollouts" if waits else name, found["stages"][stage]))
        if stage == "rollout":
            inside = {"generating": "generating", "scoring_alone": "only scoring", "engine_held": "engine held"}
            told += [(f"  {text}", found[key]) for key, text in inside.items() if found[key] > total / 1000]
        if stage == "train":
            told += [(f"  {key}", seconds) for key, seconds in found["passes"].items()]
    if not found["async"]:
        told.append(("else", max(0.0, total - sum(found["stages"].values()))))
    return told


def lines(found: Mapping[str, Any]) -> list[str]:
    """Format `profile` as a table, followed by its advice."""
    total, rollouts = found["seconds"], max(found["rollouts"], 1)
    if not total:
        return []
    told = [
        (name, f"{seconds:.2f} s", f"{seconds / total:.0%}", f"{seconds / rollouts:.3f} s")
        for name, seconds in rows(found)
    ]
    return [*table([("where the time went", f"{total:.2f} s", "", "per rollout"), *told]), *found["advice"]]
