"""A recorded run and changed settings -> predictions side by side, for `slime plan --trace RUN --what ...`.

`plan_of_trace` returns the recorded run's own settings. Their prediction is shown next to the measured values, so that
the reader can judge the accuracy of the model for this run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from slime_commands.plan.simulate import Mode, Plan, Prediction, simulate
from slime_commands.plan.workload import Recorded, Workload, engines_in
from slime_core.errors import ConfigError, did_you_mean
from slime_core.text import table

ROLLOUTS = 30
"""Largest number of simulated rollouts; more would hardly change the means."""


def plan_of_trace(settings: Mapping[str, Any], rollouts: int | None = None) -> Plan:
    """Return the recorded settings as a plan of `rollouts` rollouts."""
    mode: Mode = "sync"
    if settings.get("async_training"):
        mode = "full" if settings.get("async_mode") == "full" else "one-step"
    return Plan(
        mode=mode,
        rollouts=rollouts or max(2, min(ROLLOUTS, settings.get("num_rollout") or ROLLOUTS)),
        rollout_batch_size=settings["rollout_batch_size"],
        over_sampling_batch_size=settings.get("over_sampling_batch_size"),
        concurrency=settings.get("sglang_server_concurrency") or 512,
        buffer=settings.get("async_buffer_groups"),
        push_interval=settings.get("update_weights_interval") or 1,
        staleness=settings.get("max_staleness"),
        policy=settings.get("staleness_policy") or "recycle",
        retries=settings.get("staleness_max_retries", 3),
        partial=bool(settings.get("partial_rollout")),
        engines=engines_in(settings),
        eval_interval=settings.get("eval_interval"),
        save_interval=settings.get("save_interval"),
    )


def changed(plan: Plan, what: str) -> Plan:
    """Return `plan` with changes such as `async=full,staleness=4,engines=2`.

    Raises:
        ConfigError: A name or value is not allowed, or has no effect in the plan's mode.
    """
    changes: dict[str, Any] = {}
    for part in what.split(","):
        name, sign, value = part.strip().partition("=")
        name = name.removeprefix("--")
        if name not in WHAT or not sign:
            hint = did_you_mean(name, WHAT, form="{}" if sign else "{}=VALUE")
            raise ConfigError(f"--what {part.strip()!r}: NAME=VALUE, and the names are {', '.join(WHAT)}.{hint}")
        field, read = WHAT[name]
        try:
            changes[field] = read(value)
        except ValueError as error:
            raise ConfigError(f"--what {part.strip()!r}: {value!r} is no value of {name}; it must be {error}") from None
    plan = replace(plan, **changes)
    _check_effects(plan, changes, what)
    if "rollout_batch_size" in changes and "over_sampling_batch_size" not in changes:
        plan = replace(plan, over_sampling_batch_size=None)
    return plan


def _check_effects(plan: Plan, changes: Mapping[str, Any], what: str) -> None:
    """Raise ConfigError for a change that has no effect, as `slime train` would refuse it or warn."""
    for name, (field, _) in WHAT.items():
        modes = _MODES.get(name)
        if field in changes and modes is not None and plan.mode not in modes:
            raise ConfigError(
                f"--what {what!r}: {name} has no effect with async={plan.mode}; add async={' or async='.join(modes)}"
            )
    if "policy" in changes and plan.staleness is None:
        raise ConfigError(f"--what {what!r}: policy has no effect without a limit; add staleness=K")


def _one_of(values: Mapping[str, Any]) -> Callable[[str], Any]:
    def read(value: str) -> Any:
        if value not in values:
            raise ValueError(f"one of {', '.join(values)}")
        return values[value]

    return read


def _whole(value: str, least: int, also: str = "") -> int:
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"a whole number of at least {least}{also}")
    return int(value)


def _count(value: str) -> int:
    return _whole(value, 1)


def _limit(value: str) -> int | None:
    return None if value in ("none", "off") else _whole(value, 0, ", or none")


def _interval(value: str) -> int | None:
    return None if value in ("none", "off") else _whole(value, 1, ", or none")


_MODES: dict[str, tuple[Mode, ...]] = {
    "staleness": ("one-step", "full"),
    "policy": ("one-step", "full"),
    "update-weights-interval": ("one-step", "full"),
    "buffer": ("full",),
}
"""Name in `--what` -> modes in which it has an effect; other names have an effect in every mode."""
WHAT: dict[str, tuple[str, Callable[[str], Any]]] = {
    "async": ("mode", _one_of({m: m for m in ("sync", "one-step", "full")})),
    "staleness": ("staleness", _limit),
    "policy": ("policy", _one_of({p: p for p in ("recycle", "drop", "mask")})),
    "engines": ("engines", _count),
    "concurrency": ("concurrency", _count),
    "rollout-batch-size": ("rollout_batch_size", _count),
    "over-sampling-batch-size": ("over_sampling_batch_size", _count),
    "buffer": ("buffer", _count),
    "update-weights-interval": ("push_interval", _count),
    "partial": ("partial", _one_of({"on": True, "off": False})),
    "eval-interval": ("eval_interval", _interval),
    "save-interval": ("save_interval", _interval),
    "rollouts": ("rollouts", _count),
}
"""Name in `--what` -> field of `Plan`, and the function that reads its value."""


def predictions(workload: Workload, recorded: Recorded, whats: list[str]) -> list[tuple[str, Plan, Prediction]]:
    """Simulate the recorded settings, then each change of them. Raises ConfigError."""
    own = plan_of_trace(workload.settings, min(recorded.steps, ROLLOUTS))
    found = [("as recorded", own, simulate(workload, own))]
    base = replace(own, rollouts=max(own.rollouts, ROLLOUTS))
    for what in whats:
        plan = changed(base, what)
        found.append((what, plan, simulate(workload, plan)))
    return found


def to_dict(workload: Workload, recorded: Recorded, found: list[tuple[str, Plan, Prediction]]) -> dict[str, Any]:
    """Return plain values for JSON."""
    return {
        "measured": asdict(recorded),
        "speed": asdict(workload.speed),
        "train_fixed": workload.train_fixed,
        "train_per_token": workload.train_per_token,
        "push": workload.push,
        "evaluate": workload.evaluate,
        "save": workload.save,
        "accepted": workload.accepted,
        "predictions": [{"what": what, "plan": asdict(plan), **asdict(p)} for what, plan, p in found],
    }


def describe(recorded: Recorded, found: list[tuple[str, Plan, Prediction]]) -> list[str]:
    """Format the predictions as a table for the terminal."""
    rows = [("settings", "step", "speed-up", "trainer idle", "engines idle", "staleness", "wasted", "queue")]
    rows.append(
        ("measured", _seconds(recorded.step_seconds), "", _percent(recorded.trainer_idle),
         _percent(recorded.engine_idle), "", "", "")
    )  # fmt: skip
    base = found[0][2].step_seconds
    for what, _, p in found:
        ages = " ".join(f"{age}:{_percent(share)}" for age, share in p.staleness.items() if share >= 0.005)
        if len(p.staleness) > 5:
            ages = f"mean {p.mean_staleness:.1f}, most {max(p.staleness)}"
        rows.append(
            (what, _seconds(p.step_seconds), f"{base / p.step_seconds:.2f}x", _percent(p.trainer_idle),
             _percent(p.engine_idle), ages, _percent(p.wasted), f"{p.queue:.0f}")
        )  # fmt: skip
    return [f"  {line}" for line in table(rows)]


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _percent(share: float) -> str:
    return f"{100 * max(0.0, share):.0f}%"
