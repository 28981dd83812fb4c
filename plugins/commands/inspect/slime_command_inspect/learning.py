"""`slime why --learning`: what a run noticed of its numbers, and why its reward may not rise; `slime doctor RUN`.

Reads `incidents.jsonl` and `metrics.jsonl` of the run directory; the causes are judged on the newest quarter of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any

from slime_runs.run import Run

from slime_core.checkpoint.store import find
from slime_core.errors import CheckpointError, ConfigError

_REWARD = "rollout/raw_reward"


def examine_run(run: Run) -> tuple[str, bool]:
    """What a resume would refuse, what the run noticed, what its metrics support; True where anything is wrong.

    Raises:
        ConfigError: It is no run that trains.
    """
    damage = []
    try:
        find(run.checkpoints)
    except CheckpointError as error:
        damage.append(f"damaged: {error}")
    rows, found = _recorded(run)
    if not rows and not found and not damage:
        raise ConfigError(f"{run.path}: nothing of a run that trains is there; name its --run-dir")
    return "\n".join([*damage, *_described(rows, found)]), bool(damage or found)


def describe_learning(run: Run) -> str:
    """The text. Raises ConfigError where the run has recorded nothing."""
    rows, found = _recorded(run)
    if not rows:
        raise ConfigError(f"{run.path}: no metrics.jsonl with {_REWARD} in it; name the --run-dir of a run that trains")
    return "\n".join(_described(rows, found))


def _recorded(run: Run) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines with a reward, and incidents."""
    return [row for row in run.metrics() if _REWARD in row], run.incidents()


def _described(rows: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    lines = [f"rollout {i['rollout_id']}: {i['cause']}: {i['numbers']} [{i['check']}]" for i in found]
    lines = lines or ["no invariant was broken"]
    if not rows:
        return lines
    size = max(1, len(rows) // 4)
    first, last = rows[:size], rows[-size:]
    before, after = _mean(first, _REWARD), _mean(last, _REWARD)
    lines.append(f"reward {before:.4g} in the first {size} rollouts, {after:.4g} in the last {size}")
    if after <= before:
        causes = list(_causes(first, last))
        lines += [f"  {cause}" for cause in causes] or ["  the metrics support none of the usual causes"]
    return lines


def _causes(first: list[dict[str, Any]], last: list[dict[str, Any]]) -> Iterator[str]:
    """What the numbers support, of the usual causes."""
    groups = [sum(v for k, v in row.items() if k.startswith("rollout/zero_std/count_")) for row in last]
    norm, lr = _mean(last, "train/grad_norm"), _mean(last, "train/lr")
    if norm == 0:
        yield f"no variance in groups: the gradient is 0, with {mean(groups):.3g} groups of equal rewards a rollout"
    if lr == 0:
        yield "the learning rate is 0 (train/lr): see --lr, --lr-decay-style, --lr-decay-iters"
    if len({row[_REWARD] for row in first + last}) == 1:
        yield f"the grader gives the same mean {first[0][_REWARD]:.4g} every time: try it with slime rewards"
    if (truncated := _mean(last, "rollout/truncated_ratio")) > 0.5:
        yield f"truncation: {truncated:.0%} of the answers are cut (rollout/truncated_ratio)"
    if (clipped := _mean(last, "train/pg_clipfrac")) > 0.3:
        yield f"clipping: {clipped:.0%} of the tokens (train/pg_clipfrac)"
    if (age := _mean(last, "rollout/staleness/mean")) > 2:
        yield f"staleness: {age:.3g} versions (rollout/staleness/mean)"
    if (gap := _mean(last, "train/train_rollout_logprob_abs_diff")) > 0.1:
        yield f"trainer and engine differ by {gap:.3g} nats a token (train/train_rollout_logprob_abs_diff)"
    if (kl := _mean(last, "train/kl_loss")) > 1:
        yield f"KL: {kl:.3g} nats a token from the reference (train/kl_loss)"


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    """0 where no row has it but for the gradient and the rate, which are then not judged."""
    values = [row[name] for row in rows if name in row]
    return mean(values) if values else (1.0 if name in ("train/grad_norm", "train/lr") else 0.0)
