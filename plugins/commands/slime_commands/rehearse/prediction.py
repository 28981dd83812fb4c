"""The plan of a run (`slime plan`) -> the time and GPUs of each stage, and lines for the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime_commands.plan.memory import shown
from slime_commands.plan.run_plan import RunPlan
from slime_commands.rehearse.report import Prices
from slime_core.config import Settings
from slime_core.data.dataset import open_rows
from slime_core.errors import SlimeError


def prices(settings: Settings, plan: RunPlan) -> Prices:
    """Return the predicted seconds of the run's parts."""
    args, seconds = settings.args, plan.seconds
    evaluates = bool(args.eval_datasets and args.eval_interval)
    share = 0.0
    if seconds is not None and plan.batches and evaluates:
        share = sum(map(_samples, args.eval_datasets)) / plan.batches.samples
    return Prices(
        plan.placement.num_gpus,
        None if seconds is None else seconds.generate,
        None if seconds is None else seconds.train,
        plan.overlap,
        None if seconds is None else share * seconds.generate,
        evaluates and not args.skip_eval_before_train,
        args.save_interval,
    )


def predicted(settings: Settings, plan: RunPlan, costs: Prices) -> Iterator[str]:
    """Yield the lines of the plan."""
    yield f"{plan.placement.num_gpus} GPUs"
    yield from plan.batches.describe() if plan.batches else ()
    for device in plan.memory:
        yield f"{device.device}: {shown(device.total)}{f', to {device.peak}' if device.peak else ''}"
    if plan.seconds:
        yield plan.seconds.describe(plan.overlap)
        minutes = costs.minutes("generate", settings.args.num_rollout) if settings.args.num_rollout else None
        if minutes is not None:
            yield f"the whole run: {minutes / 60:,.3g} GPU hours at most"
    yield from (note for note in plan.notes if "GPUs are idle" not in note)


def _samples(dataset: Any) -> int:
    """Return the number of samples of an evaluation; 0 if the data set cannot be read."""
    try:
        rows = open_rows(dataset.path, dataset.name)
    except SlimeError:
        return 0
    try:
        return len(rows) * int(dataset.n_samples_per_eval_prompt)
    finally:
        rows.close()
