"""A run in the form of other tools, read back by them where they are installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from slime_runs import Run, RunError, export
from slime_runs.index import Filter
from slime_runs.new_directory import check_new, new_directory

from slime_core.errors import ConfigError
from tests.conftest import TinyRun
from tests.ports import free_port
from tests.until import wait_until


@pytest.fixture(scope="module")
def run(tiny: TinyRun, slime: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("export")
    slime("train", *tiny.argv(root, run_dir=root, num_rollout=2, save_interval=None))
    return Run(root)


@pytest.mark.parametrize("place", [".", "link", "empty", "new/one"])
def test_a_new_directory_may_be_an_empty_one(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    monkeypatch.chdir(tmp_path / "empty" if place == "." else tmp_path)
    target = Path(place)

    def write(error: Exception | None = None) -> None:
        check_new(target, place)
        with new_directory(target) as partial:
            (partial / "file").touch()
            with pytest.raises(ConfigError, match="another process is writing it"), new_directory(target):
                pass
            if error:
                raise error

    with pytest.raises(KeyError):
        write(KeyError())
    with pytest.raises(ConfigError, match=r"could not be written: .*No space left"):
        write(OSError(28, "No space left on device"))
    write()
    assert os.listdir(place) == ["file"]
    assert {path.name for path in tmp_path.iterdir()} <= {"empty", "link", "new"}
    with pytest.raises(ConfigError, match="is there already"):
        write()
    with (
        pytest.raises(ConfigError, match="file/x: cannot be written: Not a directory"),
        new_directory(target / "file/x"),
    ):
        pass


def test_rows_for_datasets(run: Run, slime: Any, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    assert (
        "32 samples of training and 16 of evaluations"
        in slime("export", run.path, "--format", "hf", "-o", folder).stdout
    )
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    stored = {s.entry.sample_index: s for s in run.samples(Filter(data_set=""))}
    assert {row["sample"] for row in rows} == set(stored)
    assert all(row["tokens"] == stored[row["sample"]].sample.tokens for row in rows)
    assert len({tuple(row) for row in rows}) == 1, "all have the same columns"
    again = slime("export", run.path, "--format", "hf", "-o", folder, check=False)
    assert "is there already" in again.stderr
    datasets = pytest.importorskip("datasets")
    found = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    assert (found["train"].num_rows, found["evaluation"].num_rows) == (32, 16)


def test_logs_for_inspect(run: Run, slime: Any, tmp_path: Path) -> None:
    slime("export", run.path, "--format", "inspect", "-o", tmp_path / "logs")
    paths = sorted((tmp_path / "logs").iterdir())
    assert [path.name for path in paths] == ["0000000_held.json", "0000002_held.json"]
    found = json.loads(paths[1].read_text())
    scores = [sample["scores"]["reward"]["value"] for sample in found["samples"]]
    assert sum(scores) / len(scores) == pytest.approx(dict(run.series("eval/held"))[2])
    log = pytest.importorskip("inspect_ai.log", reason="make test-readers has one")
    read = log.read_eval_log(str(paths[1]))
    assert (read.status, len(read.samples)) == ("success", 8)
    assert read.results.scores[0].metrics["mean"].value == pytest.approx(sum(scores) / len(scores))


@pytest.mark.parametrize("form", ["hf", "inspect"])
def test_of_samples_that_are_damaged_nothing_is_left(run: Run, refused: Any, tmp_path: Path, form: str) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    for path in (tmp_path / "run" / "samples").glob("*_0000002.*"):
        content = bytearray(path.read_bytes())
        content[100] ^= 0xFF
        path.write_bytes(content)
    said = refused("export", tmp_path / "run", "--format", form, "-o", tmp_path / "out" / form, status=2)
    assert "cannot be read" in said
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["merged", "gguf"])
def test_the_model(run: Run, slime: Any, tmp_path: Path, form: str) -> None:
    done = slime("export", run.path, "--format", form, "-o", tmp_path / "model", "--json")
    wrote = json.loads(done.stdout)["wrote"]
    apart, allowed = map(float, re.search(r"logits (\S+), at most (\S+) ", wrote).groups())  # type: ignore[union-attr]
    assert apart <= allowed < 1e-2
    assert (tmp_path / "model" / ("model.gguf" if form == "gguf" else "tokenizer.json")).is_file()


def test_models_that_are_not_exported(run: Run, refused: Any, tmp_path: Path) -> None:
    for form, flags, status, message in (
        ("merged", ["--limit", 0, "--dtype", "float16"], 1, "not the trainer's model, so nothing is written"),
        ("gguf", ["--step", 9], 1, "(after rollout 9)"),
        ("hf", ["--step", 1], 2, "slime export --step is for --format merged, peft, gguf"),
    ):
        said = refused("export", run.path, "--format", form, "-o", tmp_path / "no", *flags, status=status)
        assert message in said
        assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_the_model_of_a_run_with_adapters(tiny: TinyRun, slime: Any, tmp_path: Path) -> None:
    slime("train", *tiny.argv(tmp_path / "run", num_rollout=2, lora_rank=4, eval_prompt_data=None, eval_interval=None))
    for form in ("merged", "peft", "gguf"):
        done = slime("export", tmp_path / "run", "--format", form, "-o", tmp_path / form)
        assert "largest difference of logits" in done.stdout
    assert (tmp_path / "peft" / "adapter_model.safetensors").is_file()


def test_traces_for_opentelemetry(run: Run) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
        assert export.to_otel(run) == "traces of 48 samples -> OpenTelemetry"
    roots = [span for span in memory.get_finished_spans() if span.name == "invoke_agent slime"]
    assert sum("rl.reward" in (span.attributes or {}) for span in roots) == 32


def test_a_collector_that_does_not_take_all_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    otlp = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.sdk.trace.export import SpanExportResult

    taken: list[str] = []

    def take(self: Any, spans: Any) -> SpanExportResult:
        taken.extend(span.name for span in spans)
        return result

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(otlp.OTLPSpanExporter, "export", take)
    result = SpanExportResult.SUCCESS
    export.to_otel(run)
    assert taken.count("invoke_agent slime") == 48
    result = SpanExportResult.FAILURE
    with pytest.raises(RunError, match="did not take all"):
        export.to_otel(run)


def test_a_real_collector_has_every_trace(run: Run, tiny: TinyRun, slime: Any, tmp_path: Path) -> None:
    """Rotel's, of a run that is exported and of one that tells it while it goes on."""
    rotel = pytest.importorskip("rotel", reason="make test-readers has one")
    web, grpc = free_port(), free_port()
    log, url = tmp_path / "log", f"http://127.0.0.1:{web}"
    ports = ["--otlp-http-endpoint", f"127.0.0.1:{web}", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}"]
    command = [Path(rotel.__file__).with_name("rotel-agent"), "start", "--exporter", "blackhole", *ports]
    with log.open("wb") as file:
        told = ["--debug-log", "traces", "--debug-log-verbosity", "detailed"]
        collector = subprocess.Popen([*command, *told], stdout=file, stderr=file, cwd=tmp_path)
    try:
        wait_until(lambda: "Starting Rotel" in log.read_text(), "the collector to start")
        there = {"OTEL_EXPORTER_OTLP_ENDPOINT": url}
        assert "traces of 48 samples" in slime("export", run.path, "--format", "otel", **there).stdout
        argv = tiny.argv(tmp_path, run_dir=tmp_path / "live", num_rollout=1, save_interval=None, eval_interval=None)
        slime("train", *argv, "--set", "plugins.trackers.use=[otel]", **there)
    finally:
        collector.terminate()
        collector.wait(30)
    live = Run(tmp_path / "live").samples(Filter())
    names = Counter(re.findall(r"Name +: (\S+)", log.read_text()))
    assert names["invoke_agent"] == names["rl.reward"] == names["chat"] == 48 + sum(1 for _ in live)


def test_metrics_for_trackio(run: Run, slime: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="make test-readers has one")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # which it reads when it is imported
    done = slime("export", run.path, "--format", "trackio")
    assert f"metrics of 3 steps -> trackio, project slime, run {run.name}" in done.stdout
    again = slime("export", run.path, "--format", "trackio", check=False)
    assert f"has a run '{run.name}' of project slime already" in again.stderr
    (path,) = tmp_path.glob("*.db")
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    expected = run.series("rollout/raw_reward")
    found = [(step, json.loads(values).get("rollout/raw_reward")) for step, values in rows]
    assert [pair for pair in found if pair[1] is not None] == expected
