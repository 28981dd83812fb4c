"""Export a run for other tools: rows for `datasets`, logs of Inspect AI, traces of OpenTelemetry, a run of trackio."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError
from slime_runs.index import Filter
from slime_runs.perfetto import Trace
from slime_runs.run import Run, RunError, StoredSample
from slime_runs.timeline import FILE as TIMELINE

_CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: train.jsonl
  - split: evaluation
    path: evaluation.jsonl
---
Samples of a run of slime. `messages`, `reward_parts` and `metadata` are JSON.
"""

_SPANS = 256
"""Number of OpenTelemetry spans in a request."""


def to_hf(run: Run, folder: Path) -> str:
    """Write a folder for `datasets.load_dataset(folder)`: a row for each stored sample, all with the same columns."""
    counts = {}
    for split, wanted in (("train", Filter(data_set="")), ("evaluation", Filter())):
        rows = (s for s in run.samples(wanted, order="file") if split == "train" or s.entry.data_set is not None)
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            counts[split] = sum(bool(file.write(json.dumps(_row(sample)) + "\n")) for sample in rows)
    card = _CARD if counts["evaluation"] else _CARD.replace("  - split: evaluation\n    path: evaluation.jsonl\n", "")
    (folder / "README.md").write_text(card, encoding="utf-8")
    return f"{counts['train']} samples of training and {counts['evaluation']} of evaluations"


def _row(found: StoredSample) -> dict[str, Any]:
    entry, row = found.entry, found.row
    return {
        "rollout": entry.rollout,
        "data_set": entry.data_set or "",
        "group": entry.group_index,
        "sample": entry.sample_index,
        "messages": json.dumps(found.messages),
        "response": found.text,
        "label": "" if row.get("label") is None else str(row["label"]),
        "reward": entry.score,
        "reward_parts": json.dumps(row.get("reward")),
        "status": entry.status,
        "fate": entry.fate,
        "tokens": row.get("tokens") or [],
        "response_length": entry.response_tokens,
        "loss_mask": row.get("loss_mask") or [],
        "rollout_log_probs": row.get("rollout_log_probs") or [],
        "weight_versions": [int(v) for v in row.get("token_weight_versions") or []],
        "metadata": json.dumps(row.get("metadata") or {}),
    }


def to_inspect(run: Run, folder: Path) -> str:
    """Write logs for `inspect view --log-dir folder`: a log for each evaluation and data set."""
    logs: dict[tuple[int, str], list[StoredSample]] = {}
    for found in run.samples(Filter(), order="file"):
        if found.entry.data_set is not None:
            logs.setdefault((found.entry.rollout, found.entry.data_set), []).append(found)
    if not logs:
        raise RunError(f"{run.path}: no samples of evaluations are kept")
    for number, ((rollout, data_set), samples) in enumerate(logs.items()):
        name = re.sub(r"[^\w.-]", "_", data_set)[:100]
        path = folder / f"{rollout:07}_{name}.json"
        if path.exists():  # of a data set whose name differs in what a file's name cannot have
            path = folder / f"{rollout:07}_{name}_{number}.json"
        path.write_text(json.dumps(_log(run, rollout, data_set, samples)), encoding="utf-8")
    return f"{len(logs)} logs"


def _log(run: Run, rollout: int, data_set: str, samples: list[StoredSample]) -> dict[str, Any]:
    """Return a log in version 2 of Inspect's format."""
    written = (run.path / "samples" / samples[0].entry.file).stat().st_mtime
    at = datetime.datetime.fromtimestamp(written, datetime.UTC).isoformat()
    model = str(run.settings().get("hf_checkpoint", ("unknown", ""))[0])
    paid = [s.entry.score or 0.0 for s in samples]
    mean = {"name": "mean", "value": sum(paid) / len(paid), "params": {}}
    epochs: dict[int | None, int] = {}
    rows = []
    for sample in samples:
        epochs[sample.entry.group_index] = epochs.get(sample.entry.group_index, 0) + 1
        rows.append(_inspected(sample, model, epochs[sample.entry.group_index]))
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "created": at,
            "task": data_set,
            "task_id": f"{run.name}-{data_set}",
            "run_id": run.name,
            "dataset": {"name": data_set, "samples": len(epochs), "sample_ids": [str(i) for i in epochs]},
            "model": model,
            "config": {"epochs": max(epochs.values())},
            "metadata": {"rollout": rollout},
        },
        "plan": {"name": "plan", "steps": [{"solver": "generate", "params": {}}], "config": {}},
        "results": {
            "total_samples": len(rows),
            "completed_samples": len(rows),
            "scores": [{"name": "reward", "scorer": "reward", "params": {}, "metrics": {"mean": mean}}],
        },
        "stats": {"started_at": at, "completed_at": at, "model_usage": {}},
        "samples": rows,
    }


def _inspected(found: StoredSample, model: str, epoch: int) -> dict[str, Any]:
    entry, label = found.entry, found.row.get("label")
    told = [
        {"role": m["role"] if m.get("role") in ("system", "user", "assistant") else "user", "content": _text(m)}
        for m in found.messages
    ]
    answer = {"role": "assistant", "content": found.text, "source": "generate"}
    reason = {"truncated": "max_tokens", "completed": "stop"}.get(entry.status, "unknown")
    tokens = {"input_tokens": entry.prompt_tokens, "output_tokens": entry.response_tokens}
    usage = {**tokens, "total_tokens": entry.prompt_tokens + entry.response_tokens}
    return {
        "id": str(entry.group_index),
        "epoch": epoch,
        "input": told,
        "target": "" if label is None else str(label),
        "messages": [*told, answer],
        "output": {"model": model, "choices": [{"message": answer, "stop_reason": reason}], "usage": usage},
        "scores": {"reward": {"value": entry.score if entry.score is not None else 0.0, "answer": found.text}},
        "metadata": {"sample": entry.sample_index, "status": entry.status, "failure": entry.failure},
    }


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content)


def to_perfetto(run: Run, folder: Path) -> str:
    """Write a file for https://ui.perfetto.dev: stages, trainer processes and samples over time."""
    if not (run.path / TIMELINE).is_file():
        raise RunError(f"{run.path}: no {TIMELINE}; a run with --no-trace keeps none")
    Trace(run.path / TIMELINE, folder / "trace.json").close()
    return f"{run.path / TIMELINE} as trace.json"


def to_trackio(run: Run) -> str:
    """Write the metrics as a run of the local data base. Raises RunError if it has a run of that name."""
    trackio = _library("trackio")
    name, settings = run.name, {n: v for n, (v, _) in run.settings().items() if isinstance(v, (int, float))}
    known = set[str]()
    with suppress(ValueError):  # no project of that name yet
        known = {each.name for each in trackio.Api().runs("slime")}
    if name in known:
        raise RunError(
            f"trackio has a run {name!r} of project slime already, to which this would add every step once more;"
            " delete it there, or set TRACKIO_DIR"
        )
    target = trackio.init(project="slime", name=name, config=settings, embed=False)
    metrics = run.metrics()
    for line in metrics:
        target.log({key: value for key, value in line.items() if key != "step"}, step=line["step"])
    target.finish()
    return f"metrics of {len(metrics)} steps -> trackio, project slime, run {name}"


def to_otel(run: Run) -> str:
    """Send a trace for each sample of the timeline. Raises RunError if the collector does not accept all traces."""
    from slime_hooks.trackers.numbers import Traced, traced
    from slime_hooks.trackers.otel import check, provider, sample_spans

    _library("opentelemetry.sdk")
    check()
    made, own = provider(_sender)
    known: dict[tuple[int, int | None], Traced] = {
        (s.entry.rollout, s.entry.sample_index): traced(s.sample, s.entry.score)
        for s in run.samples(Filter(data_set=""))
    }
    model, count = Path(str(run.settings().get("hf_checkpoint", ("model", ""))[0])).name, 0
    for event in _sampled(run):
        sample = None if event.get("ev") else known.get((event["r"], event["i"]))
        sample_spans(made.get_tracer("slime"), event, sample, model)
        count += 1
    if own:
        made.shutdown()
    return f"traces of {count} samples -> OpenTelemetry"


def _sender(exporter: Any) -> Any:
    """Return a processor that hands ended spans to the exporter and waits until they are accepted."""
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExportResult

    class Sender(SpanProcessor):
        waiting: tuple[Any, ...] = ()

        def on_end(self, span: Any) -> None:
            self.waiting += (span,)
            if len(self.waiting) >= _SPANS:
                self.send()

        def send(self) -> None:
            spans, self.waiting = self.waiting, ()
            if spans and exporter.export(spans) is not SpanExportResult.SUCCESS:
                raise RunError(
                    "OTEL_EXPORTER_OTLP_ENDPOINT did not take all traces; those that it took are there. For a slow one:"
                    " OTEL_EXPORTER_OTLP_TIMEOUT, seconds of a request (10)"
                )

        def shutdown(self) -> None:
            self.send()
            exporter.shutdown()

    return Sender()


def _sampled(run: Run) -> Iterator[dict[str, Any]]:
    return (event for event in run.trace() if event["e"] == "sample")


def _library(module: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        extra = "otel" if module.startswith("opentelemetry") else module
        raise ConfigError(f"slime export needs {module}: pip install 'slime-rl[{extra}]'") from error
