"""Trackers through their own libraries, offline; adaptive KL; every hook plugin against the contract of hooks."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sqlite3
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from slime_hooks.adaptive_kl import AdaptiveKL, updated
from slime_hooks.trackers import Options, Trackers, Worker, tensorboard
from slime_hooks.trackers.numbers import Tracked, histogram, settings_of
from slime_hooks.trackers.tail import Tail
from slime_testing_contracts import suites
from slime_testing_contracts.loop import run_loop

from slime_core import Sample, SampleStatus
from slime_core.config import Args
from slime_core.errors import ConfigError
from tests.run_files import timeless
from tests.until import until

SECRET, PROMPT = "sk-very-secret", "what nobody else may read"


def samples() -> list[Sample]:
    return [
        Sample(index=i, group_index=0, prompt=PROMPT, tokens=[1, 2, 3], response="three", response_length=1,
               rollout_log_probs=[-0.5], reward=float(i), status=SampleStatus.COMPLETED)
        for i in range(4)
    ]  # fmt: skip


def follow(run_dir: Path, *, texts: int = 0, use: list[str] | None = None, **settings: Any) -> None:
    """A run of two rollouts, as the hooks see it."""
    own = {"texts": texts, "use": use or [], "prometheus_port": 0}
    args = Args(
        run_dir=str(run_dir), num_steps_per_rollout=2, system_prompt=PROMPT, plugins={"trackers": own},
        **{"use_tensorboard": False, **settings},
    )  # fmt: skip
    trackers = Trackers()
    trackers.slime_configure(args)
    trackers.slime_run_start(args, run_dir)
    for rollout in range(2):
        trackers.slime_log_rollout(rollout, args, samples())
        trackers.slime_log_metrics(
            rollout + 1, {"rollout/raw_reward": 0.5 + rollout, "eval/held-pass@1": 1.0, "rollout": 2.0}
        )
    trackers.slime_run_end(None)


def records(log: bytes) -> bytes:
    """Of a file of Weights & Biases, which is LevelDB's log: records are cut where blocks end."""
    found, place, block = b"", 7, 1 << 15
    while place + 7 <= len(log):
        left = block - place % block
        size = int.from_bytes(log[place + 4 : place + 6], "little") if left >= 7 else 0
        found += log[place + 7 : place + 7 + size] if left >= 7 else b""
        place += 7 + size if left >= 7 else left
    return found


def written(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_tensorboard_has_numbers_histograms_and_the_texts_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    follow(tmp_path, use_tensorboard=None, tb_experiment_name="mine")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "mine"), {"histograms": 0})
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("rollout/raw_reward")] == [(1, 0.5), (2, 1.5)]
    (first, _) = events.Histograms("rollout/rewards")
    assert (first.histogram_value.num, first.histogram_value.sum, first.histogram_value.max) == (4, 6, 3)
    assert PROMPT.encode() not in written(tmp_path)
    follow(tmp_path, use_tensorboard=True, texts=1)
    assert PROMPT.encode() in written(tmp_path)


@pytest.mark.parametrize(
    "values", [[1.0, 0.7 + 0.2 + 0.1], [1e15, math.nextafter(1e15, 0)], [5e-324, 0.0], [-1.0, 1.0], [3.0, 3.0], [0.0]]
)
def test_numbers_that_are_equal_but_for_rounding_have_a_histogram(values: list[float]) -> None:
    for buckets in (30, 64):
        counts, edges = histogram(values, buckets)
        assert (counts.sum(), len(edges)) == (len(values), buckets + 1)
        assert edges[0] <= min(values) <= max(values) <= edges[-1]
    assert tensorboard._histogram(values).num == len(values)


@pytest.mark.slow  # its service takes seconds to start
def test_wandb_has_them_without_key_and_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "")
    follow(
        tmp_path, use_wandb=True, wandb_mode="offline", wandb_project="mine", wandb_group="grouped", wandb_key=SECRET
    )
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    log = next(folder.glob("*.wandb"))
    asyncio.run(
        until(lambda: b"rollout/raw_reward" in records(log.read_bytes()))
    )  # its service writes on after `finish`
    found = records(log.read_bytes())
    for word in (b"rollout/raw_reward", b"rewards_histogram", b"grouped", b"num_steps_per_rollout"):
        assert word in found
    assert SECRET.encode() not in written(tmp_path)
    assert PROMPT.encode() not in found + written(folder)


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    follow(tmp_path, use=["mlflow"])
    client = tracking.MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("slime").experiment_id])
    history = client.get_metric_history(run.info.run_id, "rollout/raw_reward")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 1.5)]
    assert run.data.params["num_steps_per_rollout"] == "2"
    assert run.data.metrics["eval/held-pass_1"] == 1.0
    assert run.data.metrics["rollout/value"] == 2.0, "rollout/ is a folder of the store"
    assert run.info.status == "FINISHED"
    assert PROMPT.encode() not in written(tmp_path)


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    follow(tmp_path, use=["trackio"])
    (path,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    assert [(step, json.loads(values)["rollout/raw_reward"]) for step, values in rows] == [(1, 0.5), (2, 1.5)]


def test_prometheus_answers_with_the_newest_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    from slime_hooks.trackers.libraries import Prometheus

    tracker = Prometheus(Tracked(Args(), tmp_path, Options(prometheus_port=0), 0.0))
    tracker.metrics(1, {"rollout/raw_reward": 0.5})
    tracker.metrics(2, {"rollout/raw_reward": 0.75})
    address = capsys.readouterr().out.split()[1]
    with urllib.request.urlopen(address, timeout=10) as answer:
        assert b"slime_rollout_raw_reward 0.75" in answer.read()
    tracker.close()


def test_opentelemetry_is_refused_where_its_spans_would_go_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT=http"):
        follow(tmp_path, use=["otel"])
    with pytest.raises(ConfigError, match="remove --no-trace"):
        follow(tmp_path, use=["otel"], trace=False)


def test_opentelemetry_traces_samples_turns_and_tools(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    began = time.time() + 100
    times, tokens = [began, began + 2, began + 3], {"p": 2, "k": 0, "n": 1}
    events = [{"e": "sample", "r": 0, "g": 0, "i": i, "t": times, **tokens, "s": "completed", "v": 1} for i in range(4)]
    args = Args(
        run_dir=str(tmp_path),
        hf_checkpoint="models/tiny",
        plugins={"trackers": {"use": ["otel"]}},
        use_tensorboard=False,
    )
    trackers = Trackers()
    trackers.slime_configure(args)
    trackers.slime_run_start(args, tmp_path)
    turns = samples()
    turns[3].append_response_tokens(tokens=[4, 5], trainable=False)
    turns[3].append_response_tokens(tokens=[6], log_probs=[-1.0])
    trackers.slime_log_rollout(0, args, turns)
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    trackers.slime_log_metrics(1, {})
    trackers.slime_run_end(None)
    spans = memory.get_finished_spans()
    roots = {span.attributes["rl.sample"]: span for span in spans if span.name == "invoke_agent slime"}
    assert sorted(roots) == [0, 1, 2, 3]
    own = [span for span in spans if span.parent and span.parent.span_id == roots[3].context.span_id]
    assert [span.name for span in own] == ["chat tiny", "execute_tool", "chat tiny", "rl.reward"]
    assert [span.attributes.get("gen_ai.usage.input_tokens") for span in own] == [2, None, 5, None]
    assert roots[3].attributes["rl.reward"] == 3.0
    assert roots[3].end_time - roots[3].start_time == pytest.approx(3e9, abs=1e6)
    assert PROMPT not in str([span.to_json() for span in spans])


def test_what_is_not_installed_is_refused_with_the_line_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_hooks.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--use-wandb needs wandb: pip install 'slime-rl\[wandb\]'"):
        follow(tmp_path, use_wandb=True)


class Hanging:
    """Its first number never ends until `release`."""

    release = threading.Event()

    def metrics(self, step: int) -> None:
        self.release.wait(60)

    def close(self) -> None:
        pass


def test_a_tracker_that_hangs_costs_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker("hanging", 0.2)
    worker.start(Hanging)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        for step in range(1100):
            worker.put("metrics", step)
        worker.close()
    assert time.monotonic() - began < 30
    assert "1000 messages behind" in caplog.text
    assert "has not ended within 0.2 s" in caplog.text
    Hanging.release.set()


class Failing:
    """Raises, and the third time ends its thread."""

    calls = 0

    def metrics(self, step: int) -> None:
        Failing.calls += 1
        raise SystemExit("no") if step == 2 else OSError("disk full\nof it")

    def close(self) -> None:
        pass


def test_a_tracker_that_fails_costs_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker("failing", 10.0)
    worker.start(Failing)
    with caplog.at_level(logging.WARNING):
        for step in range(20):
            worker.put("metrics", step)
        worker.close()
    assert "tracker failing: OSError: disk full of it" in caplog.text
    assert caplog.text.count("disk full") == 2, "the first, and the one after which it is asked no more"
    assert Failing.calls == 5
    assert "messages are lost to it" in caplog.text


def test_no_secret_address_or_prompt_is_among_the_settings_and_a_name_with_key_in_it_is_none() -> None:
    found = settings_of(
        Args(wandb_key=SECRET, system_prompt=PROMPT, wandb_host="http://me:pw@host", lr=0.5, label_key="answer")
    )
    assert (found["lr"], found["label_key"], found["wandb_key"]) == (0.5, "answer", "<not kept>")
    assert not {"system_prompt", "wandb_host"} & found.keys()
    assert not {SECRET, PROMPT} & set(map(str, found.values()))


def test_a_timeline_is_read_on_past_what_a_kill_tore_and_not_past_what_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    tail = Tail(path)
    assert list(tail.new()) == []
    path.write_bytes(b'\n{"e": "run"}\n{"e": "sam\n{"e": "run"}\n{"e":')
    assert list(tail.new()) == [{"e": "run"}, {"e": "run"}]
    with path.open("ab") as file:
        file.write(b' "push"}\n')
    assert list(tail.new()) == [{"e": "push"}]


globals().update(suites("slime.plugins", "slime_hooks", {}, globals()))


def make_args(target: float | None = 0.1, **changes: Any) -> Args:
    plain = {"kl_coef": 0.0, "kl_loss_coef": 0.0, "use_kl_loss": False, "max_trainer_restarts": 0, "load": None}
    return Args(
        **{**plain, "ckpt_step": None, "finetune": False, "plugins": {"adaptive_kl": {"target": target}}, **changes}
    )


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.1, 1.0), (0.11, 1.01), (0.5, 1.02), (0.09, 0.99), (0.0, 0.98), (-3.0, 0.98),
     (float("nan"), 1.0), (float("inf"), 1.02), (float("-inf"), 0.98)],
)  # fmt: skip
def test_the_rule(kl: float, expected: float) -> None:
    assert updated(2.0, kl, 0.1, 0.1) == pytest.approx(2.0 * expected)


def test_it_moves_the_coefficient_that_is_used_once_a_rollout() -> None:
    controller, args = AdaptiveKL(), make_args(use_kl_loss=True, kl_loss_coef=0.5)
    controller.slime_configure(args)
    for rollout, kl in ((0, 0.05), (0, 0.05), (1, 0.2)):
        controller.slime_step_end(rollout, {"train/kl_loss": kl, "rollout/kl": 9.0})
    assert args.kl_loss_coef == pytest.approx(0.5 * 0.98 * 1.02)
    assert args.kl_coef == 0.0
    assert controller.slime_save_state() == {
        "slime-hooks/adaptive_kl": {"setting": "kl_loss_coef", "coefficient": args.kl_loss_coef}
    }
    controller.slime_step_end(2, {})  # a rollout that trains the critic alone
    controller.slime_configure(make_args(None))
    controller.slime_step_end(3, {"train/kl_loss": 9.0})
    assert args.kl_loss_coef == pytest.approx(0.5 * 0.98 * 1.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"adaptive_kl.target 0.1: there is no KL coefficient .* --kl-coef 0.01"),
        ({"kl_coef": 0.1, "max_trainer_restarts": 2}, r"--max-trainer-restarts 2: .* plugins.adaptive_kl"),
    ],
)
def test_what_it_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdaptiveKL().slime_configure(make_args(**changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"use_kl_loss": True, "kl_loss_coef": 0.1},
        {"kl_coef": 0.1, "advantage_estimator": "reinforce_plus_plus"},
    ],
    ids=["loss", "reward"],
)
def test_a_resumed_run_is_the_run(tmp_path: Path, flags: dict[str, Any]) -> None:
    flags = {**flags, "plugins": {"adaptive_kl": {"target": 1e-4}}, "lr": 1e-2, "save_interval": 1}
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = run_loop(tmp_path / "whole", 3, **flags)
    run_loop(tmp_path / "parts", 1, **flags)
    parts = run_loop(tmp_path / "parts", 3, **flags, load=tmp_path / "parts" / "run")
    assert timeless(parts.run_dir) == timeless(whole.run_dir)
    assert parts.weight_checksums == whole.weight_checksums
    assert whole.metric("rollout/kl_coefficient") == pytest.approx([0.1 * 0.98, 0.1 * 0.98 * 1.02])
