"""Summarize a run: curves, rollouts, evaluations, time profile, dropped groups, incidents.

`overview` returns plain values, which `slime show --json` prints; `lines` formats them as text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime_runs import profile, shadows
from slime_runs.index import Filter
from slime_runs.numbering import shown_number, shown_place
from slime_runs.reading import question, tokenizer_of
from slime_runs.run import Run, StoredSample
from slime_runs.scores import data_sets
from slime_runs.text import number, one_line, sparkline, table

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CURVES = {
    "reward": "rollout/raw_reward",
    "loss": "train/loss",
    "length": "rollout/response_len/mean",
    "truncated": "rollout/truncated_ratio",
    "entropy": "train/entropy_loss",
    "gradient": "train/grad_norm",
    "KL": "train/kl_loss",
    "log-prob gap": "train/train_rollout_logprob_abs_diff",
    "tokens/s": "perf/tokens_per_sec",
}
"""Name in the overview -> metric."""
PARTS = "rollout/reward/"
"""Beginning of the metrics of parts of rewards."""
_DROPS = "rollout/dynamic_filter/drop_"
_LAST = 5


def overview(run: Run) -> dict[str, Any]:
    """Return all data of `slime show` as JSON values."""
    metrics, settings = run.metrics(), run.settings()
    index = run.index()
    rollouts = [
        {"rollout": t.rollout, "samples": t.samples, "score": t.score, "dropped": t.dropped, "failed": t.failed}
        for t in index.rollouts()[-_LAST:]
    ]
    wanted = None if run.is_evaluation() else settings.get("num_rollout", (None, ""))[0]
    chosen = Filter() if run.is_evaluation() else Filter(data_set="")
    done = max((line["step"] for line in metrics), default=0)
    return {
        "run": str(run.path),
        "state": run.state(),
        "rollouts": {"done": done, "of": wanted},
        "model": settings.get("hf_checkpoint", (None, ""))[0],
        "evaluation": run.evaluation() if run.is_evaluation() else None,
        "is_evaluation": run.is_evaluation(),
        "curves": {name: run_curve for name, metric in CURVES.items() if (run_curve := _curve(metrics, metric))},
        "evaluations": evaluations(metrics),
        "last_rollouts": rollouts,
        "profile": profile.profile(run),
        "dropped": _dropped(metrics),
        "shadows": shadows.summary(run),
        "stored": {"samples": index.size(), "bytes": index.total_bytes()},
        "stalls": [str(path) for path in run.stalls()],
        "engine_events": dict(Counter(event["event"] for event in run.events())),
        "best": _short(next(run.stored(index.find(chosen, order="best", limit=1)), None), tokenizer_of(run)),
        "worst": _short(next(run.stored(index.find(chosen, order="worst", limit=1)), None), tokenizer_of(run)),
    }


def _curve(metrics: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(line["step"], line[name]) for line in metrics if line.get(name) is not None]


def evaluations(metrics: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return data set -> [(step, score)]."""
    return {name: _curve(metrics, f"eval/{name}") for name in data_sets(names_of(metrics))}


def names_of(metrics: list[dict[str, Any]]) -> set[str]:
    """Return the names of all metrics."""
    return set().union(*metrics) - {"step"}


def _dropped(metrics: list[dict[str, Any]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for line in metrics:
        total.update({n.removeprefix(_DROPS): v for n, v in line.items() if n.startswith(_DROPS)})
    return dict(total.most_common())


def _short(found: StoredSample | None, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    if found is None:
        return None
    entry = found.entry
    return {
        "rollout": entry.rollout, "data_set": entry.data_set, "group": entry.group_index, "sample": entry.sample_index,
        "score": entry.score,
        "prompt": question(found.row, tokenizer), "response": found.text,
    }  # fmt: skip


def score_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each data set and score of an evaluation's report."""
    rows: list[tuple[str, ...]] = []
    for name, of in report["datasets"].items():
        for score, value in of["scores"].items():
            between = "-" if value["low"] is None else f"{number(value['low'])} to {number(value['high'])}"
            counts = str(of["prompts"]), str(of["samples_per_prompt"])
            rows.append((name, *counts, score, number(value["value"]), between))
    return rows


def lines(found: Mapping[str, Any]) -> list[str]:
    """Format `overview` as text."""
    done, of = found["rollouts"]["done"], found["rollouts"]["of"]
    what = "evaluation" if found["is_evaluation"] else f"{done} of {of or '?'} rollouts"
    text = [f"{found['run']}: {found['state']}, {what}, model {found['model']}"]
    if found["evaluation"] is not None:
        text += [
            "",
            *table([("data set", "prompts", "n", "score", "value", "interval"), *score_rows(found["evaluation"])]),
        ]
    elif found["is_evaluation"] and found["state"] == "stopped":
        text.append(f"not finished; go on with: slime eval --resume {found['run']}")
    if found["curves"]:
        rows = [
            (name, sparkline([v for _, v in curve]), number(curve[0][1]), "->", number(curve[-1][1]))
            for name, curve in found["curves"].items()
        ]
        text += ["", *table(rows)]
    for name, scores in found["evaluations"].items():
        if scores:
            text.append(f"{name}: " + ", ".join(f"{number(v)} after {step}" for step, v in _few(scores)))
    if found["last_rollouts"]:
        rows = [("rollout", "reward", "samples", "dropped", "failed")] + [
            (
                str(shown_number(r["rollout"])),
                number(r["score"]),
                str(r["samples"]),
                str(r["dropped"]),
                str(r["failed"]),
            )
            for r in found["last_rollouts"]
        ]
        text += ["", *table(rows)]
    if found["dropped"]:
        text += ["", "groups dropped: " + ", ".join(f"{n:.0f} {reason}" for reason, n in found["dropped"].items())]
    if spent := profile.lines(found["profile"]):
        text += ["", *spent]
    for name in ("best", "worst"):
        if (sample := found[name]) is not None:
            place = shown_place(sample["rollout"], sample["data_set"])
            text += [
                "",
                f"{name}: {place}, group {sample['group']}, reward {number(sample['score'])}",
            ]
            text += [f"  {one_line(sample['prompt'], 200)}", f"  -> {one_line(sample['response'], 300)}"]
    text += _shadows(found["shadows"])
    text += _incidents(found)
    if found["stored"]["samples"]:
        stored = found["stored"]
        text += [
            "",
            f"{stored['samples']:,} samples kept ({stored['bytes'] / 1e6:.1f} MB): slime samples show {found['run']}",
        ]
    return text


def _few(scores: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return scores if len(scores) <= 4 else [scores[0], *scores[-3:]]


def _shadows(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    text = []
    for spec, of in found.items():
        line = f"shadow {spec}: agrees on {of['agree']:.1%} of {of.get('samples', of.get('groups'))}"
        if "samples" in of:
            line += f" samples, rank correlation {number(of['rank_correlation'])}, {number(of['seconds'])} s each"
        else:
            line += " groups"
        text.append(line)
    return ["", *text, "what they differ on: slime samples show RUN --disagree"] if text else []


def _incidents(found: Mapping[str, Any]) -> list[str]:
    text = [f"waited too long: {path}" for path in found["stalls"]]
    if found["engine_events"]:
        text.append("engines: " + ", ".join(f"{n} {event}" for event, n in found["engine_events"].items()))
    return ["", *text] if text else []
