"""`slime eval` from prepared settings to its report: evaluate the groups missing in the record, then score the record.

`command.py` prints the report. A resume continues the record and makes the report from it. A user's own evaluation
function keeps no record and starts from the beginning.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_runs.scores import prompts_of, score_values

from slime_commands.eval.generation import own_directory
from slime_commands.eval.intervals import CONFIDENCE, RESAMPLES, estimates
from slime_commands.eval.record import EvalRecord, read_state
from slime_core.checkpoint.run_dir import CONFIG, run_dir_of, versions, write_text
from slime_core.config.eval_config import located_deep
from slime_core.data.dataset import open_rows
from slime_core.errors import ConfigError
from slime_core.launch.lock import open_run_dir
from slime_core.launch.prepare import Prepared
from slime_core.protocols import Args, RolloutTraits, traits_of
from slime_core.rollout.generate import sampling_seed
from slime_core.sample import SampleStatus
from slime_core.sample.types import executions
from slime_core.waits import first_results

REPORT = "eval.json"
REPORT_SCHEMA = 1
_HASHED_BYTES = 1 << 20
_ONLY_SCORING = ("answer_path", "ks")
"""Data set settings that may differ when an evaluation resumes, because they do not affect its samples."""


def resumed_argv(argv: list[str]) -> list[str]:
    """Return the flags of `slime eval` with `--resume RUN` replaced by the flags of RUN; unchanged without it.

    Raises:
        ConfigError: RUN has no evaluation to resume.
    """
    run = None
    for place, word in enumerate(argv):
        if word == "--resume" and place + 1 < len(argv):
            run = argv[place + 1]
        elif word.startswith("--resume="):
            run = word.partition("=")[2]
    if run is None:
        return argv
    if read_state(Path(run)) is None or not (Path(run) / CONFIG).is_file():
        raise ConfigError(f"--resume {run}: no evaluation to go on with; slime eval --run-dir {run} begins one there")
    return ["--config", str(Path(run) / CONFIG), *argv, "--run-dir", run]


def evaluate(prepared: Prepared) -> dict[str, Any]:
    """Evaluate, write the record and `eval.json`, and return the content of `eval.json`.

    Raises:
        ConfigError: The run directory holds an evaluation with other settings.
        RolloutError: The evaluation stopped; finished groups are in the record.
    """
    with own_directory(prepared.args, "eval"):
        return _evaluate(prepared)


def _evaluate(prepared: Prepared) -> dict[str, Any]:
    args, run_dir = prepared.args, run_dir_of(prepared.args)
    record = _record(prepared, run_dir)
    stage = prepared.rollout_stage(draws=False)
    stage.parts.eval_record = record
    finished = False
    try:
        stage.start()
        first_results()  # how long the evaluation takes is the data set's affair
        data, timing = stage.evaluate_samples(0)
        finished = True
    finally:
        try:
            stage.stop()
        finally:  # a second ctrl-C ends that
            if record is not None:
                record.close()
                if not finished:
                    _tell_left(record, run_dir)
    if record is not None:
        record.finish()
    metrics = {k: v for k, v in stage.eval_metrics(0, data, dict(timing)).items() if k != "perf/eval_time"}
    report = {
        "schema": REPORT_SCHEMA,
        "hf_checkpoint": args.hf_checkpoint,
        "metrics": metrics,
        "seconds": timing["perf/eval_time"],
        "confidence": CONFIDENCE,
        "bootstrap_resamples": RESAMPLES,
        "datasets": {name: _of_dataset(args, name, columns) for name, columns in data.items()},
        "resumed": {"prompts_kept": record.kept, "prompts": record.total} if record is not None else None,
        "model": _model(args.hf_checkpoint),
        "settings": prepared.settings.to_dict(),
        "plugins": prepared.plugins,
        "versions": versions(),
    }
    write_text(run_dir / REPORT, json.dumps(report, indent=2, default=_plain) + "\n")
    return report


def _record(prepared: Prepared, run_dir: Path) -> EvalRecord | None:
    """Return the record to resume, or a new one; None if the evaluation function keeps no record."""
    args = prepared.args
    before = read_state(run_dir)
    if not traits_of(prepared.parts.eval_function, RolloutTraits).records_evaluation:
        if args.resume is not None:
            raise ConfigError(
                f"--resume {args.resume}: --eval-function-path {args.eval_function_path!r} keeps no record of what it"
                " has done; run it again without --resume"
            )
        _begin(prepared, run_dir)
        return None
    record = EvalRecord(run_dir, _plan(prepared))
    if args.resume is not None:
        assert before is not None, "the command has looked"
        _check_same(before["plan"], json.loads(json.dumps(record.plan)), run_dir)
        record.open([d.name for d in args.eval_datasets])
        print(f"resumed from {run_dir}: {record.kept} prompts are done; the others follow", flush=True)
        return record
    if before is not None and not before["finished"] and not args.overwrite:
        raise ConfigError(
            f"{run_dir} holds an evaluation that is not finished. Go on with it: slime eval --resume {run_dir};"
            " start over with --overwrite; or choose another --run-dir"
        )
    _begin(prepared, run_dir)
    record.begin()
    return record


def _begin(prepared: Prepared, run_dir: Path) -> None:
    open_run_dir(prepared.args, resume=False)
    write_text(run_dir / CONFIG, prepared.settings.to_yaml(directory=os.getcwd()))


def _tell_left(record: EvalRecord, run_dir: Path) -> None:
    print(
        f"{record.done} of {record.total} prompts are done and kept; go on with: slime eval --resume {run_dir}",
        flush=True,
    )


def _plan(prepared: Prepared) -> dict[str, Any]:
    """Return the settings that determine an evaluation's samples; paths are absolute, as --resume may run elsewhere."""
    args = prepared.args
    datasets = {}
    for dataset in args.eval_datasets:
        rows = open_rows(dataset.path, origin=f"evaluation data set {dataset.name!r}:")
        datasets[dataset.name] = {"settings": dataset.model_dump(mode="json"), "data": rows.fingerprint()}
        rows.close()
    names = ("rollout_seed", "rm_type", "custom_rm_path", "environment_path", "tools_path", "tool_call_parser")
    plan = {
        "model": _model(args.hf_checkpoint),
        "datasets": datasets,
        **{name: getattr(args, name) for name in names},
        "plugin_options": args.plugins,
        "plugins": [{k: p.get(k) for k in ("kind", "name", "version", "sha256")} for p in prepared.plugins],
    }
    whole = located_deep(plan, os.getcwd())
    assert isinstance(whole, dict)
    return whole


def _check_same(then: Mapping[str, Any], now: Mapping[str, Any], run_dir: Path) -> None:
    """Raise ConfigError that names each difference between the recorded evaluation and this one."""
    changes = [c for c in _differences("", then, now) if c.partition(" ")[0].rpartition(".")[2] not in _ONLY_SCORING]
    if changes:
        raise ConfigError(
            f"--resume {run_dir}: what is done there would not be what this makes: {'; '.join(changes)}. Restore that,"
            " or begin another evaluation with --run-dir"
        )


def _differences(path: str, then: Any, now: Any) -> list[str]:
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        keys = [*then, *(k for k in now if k not in then)]
        return [c for k in keys for c in _differences(f"{path}.{k}".lstrip("."), then.get(k), now.get(k))]
    return [] if then == now else [f"{path} {then!r:.120} -> {now!r:.120}"]


def _of_dataset(args: Args, name: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report's section for one data set."""
    seed = sampling_seed(args.rollout_seed, "bootstrap", name)
    samples, prompts = columns.get("samples") or [], prompts_of(columns)
    settings = next((d.model_dump(mode="json") for d in args.eval_datasets if d.name == name), None)
    counts = {s: sum(x.status == s for x in samples) for s in (SampleStatus.FAILED, SampleStatus.TRUNCATED)}
    found = estimates(score_values(columns), seed)
    return {
        "prompts": len(prompts),
        "samples_per_prompt": min((len(p.rewards) for p in prompts), default=0),
        "executions": len(executions(samples)),
        "failed": max(counts[SampleStatus.FAILED], columns.get("failed", 0)),
        "truncated": counts[SampleStatus.TRUNCATED],
        "scores": {score: dataclasses.asdict(e) for score, e in found.items()},
        "weight_versions": sorted({v for s in samples for v in s.weight_versions}),
        "settings": settings,
    }


def _model(directory: str | None) -> dict[str, Any]:
    """Return a digest of a model directory: each file's size and a hash of its first and last MiB."""
    root = Path(directory or "")
    files = {}
    for path in sorted(root.glob("*")) if directory and root.is_dir() else []:
        if path.is_file() and path.suffix in (".json", ".safetensors", ".bin", ".model"):
            files[path.name] = {"size": path.stat().st_size, "sha256_ends": _hash_of_ends(path)}
    return {"path": directory, "files": files}


def _hash_of_ends(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_HASHED_BYTES))
        file.seek(max(_HASHED_BYTES, path.stat().st_size - _HASHED_BYTES))
        digest.update(file.read())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Convert settings that json cannot encode (pydantic models, paths) to plain values."""
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else str(value)
