"""Who has the devices when, and what components must be able to do for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from slime_core import loop
from slime_core.config import Args, load_settings
from slime_core.launch.checks import settle_offload
from slime_core.launch.components import Components
from slime_core.launch.drive import RunParts, Training
from slime_core.protocols import EngineTraits, TrainerTraits
from slime_core.rollout.stage import RolloutParts, RolloutStage


class Recorder:
    """Any stage: writes down what is called."""

    def __init__(self, calls: list[str], name: str, answers: dict[str, Any] | None = None) -> None:
        self._calls, self._name, self._answers = calls, name, answers or {}

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            shown = ",".join("+".join(a) for a in arguments if isinstance(a, tuple))
            self._calls.append(f"{self._name}.{method}{f'({shown})' if shown else ''}")
            return self._answers.get(method, {})

        return call


def order(**switches: bool) -> tuple[list[str], list[dict[str, float]]]:
    """What one run of two rollouts calls, and its metrics."""
    calls: list[str] = []
    logged: list[dict[str, float]] = []
    batch = SimpleNamespace(batch=None, metrics={})
    rollout, trainers = Recorder(calls, "rollout", {"generate": batch}), Recorder(calls, "trainers")
    journal = SimpleNamespace(
        log=lambda step, metrics: None,
        step_end=lambda rollout_id, metrics: logged.append(metrics),
        save=lambda rollout_id: calls.append("save"),
    )
    args = Args(
        **{"offload_train": False, "offload_rollout": False, **switches},
        num_rollout=2, eval_interval=2, save_interval=1, skip_eval_before_train=True, update_weights_interval=1,
        async_training=False,
    )  # fmt: skip
    learner, weights = Recorder(calls, "learner"), Recorder(calls, "weights")
    training = Training(args, RunParts(trainers, rollout, rollout, learner, weights))
    assert loop.now(loop.train(args, loop.Stages(rollout, training, training, journal), 0)) == 2
    return [call for call in calls if ".before_" not in call], logged


def test_each_side_gives_its_memory_up_while_the_other_works() -> None:
    calls, logged = order(offload_train=True, offload_rollout=True)
    push = ["rollout.resume_memory(weights)", "weights.push", "rollout.resume_memory(kv_cache)"]
    train = ["rollout.release_memory", "trainers.onload", "learner.train", "trainers.offload"]
    first = ["rollout.generate", *train, *push, "save"]
    second = ["rollout.generate", *train, *push, "rollout.evaluate", "save"]
    assert calls == [*push, *first, *second]
    assert all({"perf/offload_time", "perf/onload_time"} <= metrics.keys() for metrics in logged)


def test_one_side_alone_and_none() -> None:
    calls, _ = order(offload_rollout=True)
    assert not [call for call in calls if call.startswith("trainers")]
    calls, _ = order(offload_train=True)
    assert not [call for call in calls if "memory" in call]
    calls, logged = order()
    assert not [call for call in calls if "memory" in call or call.startswith("trainers")]
    assert logged == [{}, {}]


def test_an_engine_is_asked_for_what_is_missing_only() -> None:
    calls: list[tuple[str, Any]] = []

    class Engine:
        async def abort(self) -> None:
            calls.append(("abort", None))

        async def release_memory(self) -> None:
            calls.append(("release", None))

        async def resume_memory(self, tags: list[str]) -> None:
            calls.append(("resume", tags))

    stage = RolloutStage(Args(), RolloutParts(None, lambda: None, None, engine=Engine()))  # type: ignore[arg-type]
    stage.resume_memory(("weights",))
    stage.release_memory()
    stage.release_memory()  # the loop was begun again in between
    stage.resume_memory(("weights",))
    stage.resume_memory(("weights",))
    stage.resume_memory(("kv_cache",))
    assert calls == [("abort", None), ("release", None), ("resume", ["weights"]), ("resume", ["kv_cache"])]
    stage.parts.engine = None
    stage.release_memory()
    stage.resume_memory(("weights",))
    stage.stop()


class Able:
    traits = TrainerTraits(uses=frozenset({"offload_train", "offload_rollout"}))


class AbleEngine:
    """An engine that gives its memory up."""

    traits = EngineTraits(uses=frozenset({"offload_rollout"}))


class Plain:
    pass


def settled(caplog: pytest.LogCaptureFixture, *argv: str, engine: Any, trainer: Any) -> tuple[bool, bool, list[str]]:
    settings = load_settings(["--num-rollout", "1", *argv], command="show", env={})
    with caplog.at_level(logging.WARNING, logger="slime_core"):
        settle_offload(settings, Components(engine=engine, trainer=trainer))
    said = [record.getMessage() for record in caplog.records]
    return bool(settings.args.offload_train), bool(settings.args.offload_rollout), said


def test_components_that_cannot_keep_their_memory(caplog: pytest.LogCaptureFixture) -> None:
    assert settled(caplog, "--colocate", engine=AbleEngine, trainer=Able) == (True, True, [])
    assert settled(caplog, "--offload", engine=None, trainer=Able) == (True, False, [])
    train, rollout, said = settled(caplog, "--offload", engine=Plain, trainer=Able)
    assert (train, rollout) == (True, False)
    assert len(said) == 1
    assert "--rollout-engine" in said[0]
    assert "keeps its memory" in said[0]


@pytest.mark.parametrize(
    ("flags", "train", "rollout", "warnings"),
    [
        ("", False, False, []),
        ("--offload", True, True, []),
        ("--colocate", True, True, []),
        ("--colocate --no-offload-train", False, True, []),
        ("--offload --no-offload-rollout", True, False, []),
        ("--offload-rollout", False, True, []),
        ("--offload --debug-rollout-only", False, False, ["--offload (flag) has no effect: nothing is trained."]),
    ],
)
def test_what_the_flags_mean(flags: str, train: bool, rollout: bool, warnings: list[str]) -> None:
    settings = load_settings(["--num-rollout", "1", *flags.split()], command="show", env={})
    assert (settings.args.offload_train, settings.args.offload_rollout) == (train, rollout)
    assert [w for w in settings.warnings if "offload" in w] == warnings
