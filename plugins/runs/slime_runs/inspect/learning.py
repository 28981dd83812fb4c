"""`slime why --learning`: the incidents of a run, and likely causes if its reward does not rise.

Reads `incidents.jsonl`, `metrics.jsonl`, settings and a few samples of the run directory. The first third of the
rollouts is compared with the last third. Causes are named if the reward does not rise by more than its noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from slime_commands.plan import choices
from slime_commands.plan.choices import COLD, HOT
from slime_commands.plan.memory import Parameters

from slime_core.checkpoint.store import find
from slime_core.errors import CheckpointError, ConfigError, rollout_name
from slime_runs.run import Run, RunError
from slime_runs.text import one_line

_REWARD, _ERROR = "rollout/raw_reward", "rollout/raw_reward_stderr"
_NOISE = 3.0
"""Minimum difference of two means in standard errors: a few groups with skewed rewards have more outliers than a normal
distribution."""
_OF_STANDING_WEIGHTS = ("every_tensor_moves", "weights_move")
"""Checks of the invariants that a learning rate near 0 explains."""
_SMALL_KL, _LOOKED_AT, _WIDTH = 0.02, 8, 60

Row = dict[str, Any]


def examine_run(run: Run) -> tuple[str, bool]:
    """Describe damage that prevents a resume, incidents, and conclusions from the metrics; also True if any is wrong.

    Raises:
        ConfigError: The run does not train.
    """
    damage = []
    try:
        find(run.checkpoints)
    except CheckpointError as error:
        damage.append(f"damaged: {error}")
    rows, found = _recorded(run)
    if not rows and not found and not damage:
        raise ConfigError(f"{run.path}: no metrics.jsonl with {_REWARD} in it; name the --run-dir of a run that trains")
    return "\n".join([*damage, *_described(run, rows, found)]), bool(damage or found)


def _recorded(run: Run) -> tuple[list[Row], list[Row]]:
    """Return the lines with a reward, and the incidents."""
    return [row for row in run.metrics() if _REWARD in row], run.incidents()


def _described(run: Run, rows: Sequence[Row], found: Sequence[Row]) -> list[str]:
    evidence = _Evidence(run, rows) if rows else None
    rises, causes = (True, []) if evidence is None else (evidence.rises, list(_causes(evidence)))
    if any(cause.startswith(_TOO_SMALL) for cause in causes):
        found = [incident for incident in found if incident["check"] not in _OF_STANDING_WEIGHTS]
    lines = [f"{rollout_name(i['rollout_id'])}: {i['cause']}: {i['numbers']} [{i['check']}]" for i in found]
    lines = lines or ["no invariant was broken"]
    if evidence is not None:
        lines.append(evidence.verdict)
    if not rises:
        lines += [f"  {cause}" for cause in causes] or [
            "  the metrics support none of the usual causes" + ("; see the lines above" if found else "")
        ]
    return lines


@dataclass(frozen=True)
class _Evidence:
    """Numbers that show whether a run learns."""

    run: Run
    rows: Sequence[Row]

    @cached_property
    def size(self) -> int:
        """Number of rollouts in a third of the run."""
        return max(1, len(self.rows) // 3)

    @cached_property
    def first(self) -> Sequence[Row]:
        """Rows of the first third."""
        return self.rows[: self.size]

    @cached_property
    def last(self) -> Sequence[Row]:
        """Rows of the last third."""
        return self.rows[-self.size :]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings of the run."""
        return {name: value for name, (value, _) in self.run.settings().items()}

    @cached_property
    def parameters(self) -> int:
        """Number of parameters of the model; 0 if neither the model nor a commit exists any more."""
        commits = sorted(self.run.checkpoints.glob("rollout_*"), reverse=True)
        for directory in (Path(str(self.settings.get("hf_checkpoint"))), *commits[:1]):
            try:
                if total := Parameters.of_directory(directory).total:
                    return total
            except (OSError, ValueError):
                continue
        return 0

    @property
    def rises(self) -> bool:
        """True if the reward rises by more than its noise."""
        return self._gain > _NOISE * self._error

    @property
    def verdict(self) -> str:
        """Sentence with the mean rewards, their standard errors, and the conclusion from them."""
        parts = (("first", self.first), ("last", self.last))
        means = [f"{self.mean(_REWARD, of):.4g} +- {_error(of):.2g} in the {name} {len(of)}" for name, of in parts]
        falls = -self._gain > _NOISE * self._error
        says = "it rises" if self.rises else "it falls" if falls else "it does not rise by more than its noise"
        return f"reward {means[0]} rollouts, {means[1]}: {says}"

    @property
    def _gain(self) -> float:
        return self.mean(_REWARD, self.last) - self.mean(_REWARD, self.first)

    @property
    def _error(self) -> float:
        return math.hypot(_error(self.first), _error(self.last))

    def mean(self, name: str, rows: Sequence[Row] | None = None) -> float:
        """Mean of a metric over rows, by default the last third; 0 if none has it."""
        values = [row[name] for row in (self.last if rows is None else rows) if row.get(name) is not None]
        return fmean(values) if values else 0.0

    def number(self, name: str, missing: float = 0.0) -> float:
        """Return a setting as a number."""
        value = self.settings.get(name)
        return float(value) if isinstance(value, int | float) else missing

    @property
    def equal_groups(self) -> float:
        """Share of the groups whose rewards are all equal."""
        counts = [sum(v for k, v in row.items() if k.startswith("rollout/zero_std/count_")) for row in self.last]
        return fmean(counts) / max(1.0, self.number("rollout_batch_size", 1.0))


def _error(rows: Sequence[Row]) -> float:
    """Standard error of the mean reward of some rollouts; by their own spread where the run recorded none."""
    errors = [row[_ERROR] for row in rows if _ERROR in row]
    if len(errors) == len(rows):
        return math.hypot(*errors) / len(rows)
    return stdev(row[_REWARD] for row in rows) / math.sqrt(len(rows)) if len(rows) > 1 else 0.0


# -- causes --------------------------------------------------------------------------------------------------

_TOO_SMALL = "learning rate too small"


def _causes(it: _Evidence) -> Iterator[str]:
    """Explain a reward that does not rise, the likeliest cause first."""
    yield from _of_learning_rate(it)
    yield from _of_kl(it)
    yield from _of_sampling(it)
    yield from _of_rewards(it)
    if (clipped := it.mean("train/pg_clipfrac")) > 0.3:
        yield f"clipping: {clipped:.0%} of the tokens (train/pg_clipfrac)"
    if (age := it.mean("rollout/staleness/mean")) > 2:
        yield f"staleness: {age:.3g} versions (rollout/staleness/mean)"
    if (gap := it.mean("train/train_rollout_logprob_abs_diff")) > 0.1:
        yield f"trainer and engine differ by {gap:.3g} nats a token (train/train_rollout_logprob_abs_diff)"
    if (kl := it.mean("train/kl_loss")) > 1:
        yield f"KL: {kl:.3g} nats a token from the reference (train/kl_loss)"


def _of_learning_rate(it: _Evidence) -> Iterator[str]:
    """Compare the steps with the weights; a step without a gradient proves nothing."""
    rates = [row["train/lr"] for row in it.rows if "train/lr" in row]
    if rates and not any(rates):
        yield "the learning rate is 0 (train/lr): see --lr, --lr-decay-style, --lr-decay-iters"
    ratios = [r["train/update_ratio"] for r in it.rows if r.get("train/update_ratio") and r.get("train/grad_norm")]
    if not ratios or not any(rates) or not it.parameters:
        return
    lora = it.settings.get("lora_rank") is not None
    usual = choices.usual_update(it.parameters, lora=lora)
    begin = f"{choices.usual_rate(it.parameters, lora=lora):.0e}"
    for word, ratio, wrong in (
        (_TOO_SMALL, max(ratios), max(ratios) < usual * choices.TOO_SMALL),
        ("learning rate too large", median(ratios), median(ratios) > usual * choices.TOO_LARGE),
    ):
        if wrong:
            yield (
                f"{word}: at {max(rates):.3g} a step moves the weights by {ratio:.1e} of their size"
                f" (train/update_ratio), where {usual:.0e} is usual for {choices.in_words(it.parameters)}"
                f" parameters; type --lr {begin}"
            )


def _of_kl(it: _Evidence) -> Iterator[str]:
    """Find a KL term that outweighs the reward.

    Advantages of standard deviation 1 can gain at most sqrt(2 T d) over a response of T tokens by a policy that is d
    nats a token away, which costs coefficient x T d: with coefficient x sqrt(2 T d) over 1 the term holds the policy.
    """
    tokens = it.mean("rollout/response_len/mean")
    for flag, name in (("kl_loss_coef", "train/kl_loss"), ("kl_coef", "rollout/kl")):
        kl, coefficient = it.mean(name), it.number(flag)
        if kl < _SMALL_KL and coefficient * math.sqrt(2 * max(0.0, kl) * tokens) > 1:
            yield (
                f"KL holds the policy: --{flag.replace('_', '-')} {coefficient:g} keeps it within {kl:.1e} nats a token"
                f" of the reference ({name}); type 0.001 to 0.05, or leave the term out"
            )


def _of_sampling(it: _Evidence) -> Iterator[str]:
    """Check temperature and length."""
    temperature = it.number("rollout_temperature", 1.0)
    if temperature > HOT:
        entropy = f", {it.mean('train/entropy_loss'):.2g} nats a token" if "train/entropy_loss" in it.last[-1] else ""
        yield f"temperature: at --rollout-temperature {temperature:g} answers are noise{entropy}; type 0.7 to 1.0"
    elif temperature < COLD and it.equal_groups > 0.5:
        yield (
            f"temperature: at --rollout-temperature {temperature:g} the answers of a group are alike, and"
            f" {it.equal_groups:.0%} of the groups have equal rewards; type 0.7 to 1.0"
        )
    if (truncated := it.mean("rollout/truncated_ratio")) > 0.5:
        limit = it.settings.get("rollout_max_response_len")
        yield (
            f"truncation: {truncated:.0%} of the answers are cut (rollout/truncated_ratio) at"
            f" --rollout-max-response-len {limit}"
        )


def _of_rewards(it: _Evidence) -> Iterator[str]:
    """Find rewards that do not distinguish answers."""
    if it.number("n_samples_per_prompt", 2) == 1 and not it.mean("train/grad_norm"):
        yield "groups of one answer have nothing to compare it with: type --n-samples-per-prompt 8"
    elif (equal := it.equal_groups) > 0.9:
        yield f"no variance in groups: {equal:.0%} of them have equal rewards, and teach nothing"
    values = {row[_REWARD] for row in it.rows}
    if len(values) > 1:
        return
    (value,) = values
    if value:
        yield f"the grader gives the same mean {value:.4g} every time: try it with slime rewards"
        return
    yield (
        "no answer was ever rewarded: the task is too hard for the model (slime eval measures the share that it"
        f" solves; 5 to 60% learns), or the grader expects another label or form{_example(it.run)}"
    )


def _example(run: Run) -> str:
    """Show an answer beside its label; say so if the labels look like prompts."""
    try:
        found = [stored for stored in run.samples(limit=_LOOKED_AT) if stored.row.get("label") is not None]
    except (RunError, OSError, ValueError):
        return ""
    if not found:
        return "; no sample has a label (--label-key)"
    prompts = [one_line(" ".join(str(m.get("content")) for m in one.messages), 10_000) for one in found]
    asked = all(one_line(str(one.row["label"]), 10_000) in prompt for one, prompt in zip(found, prompts))
    label, answer = one_line(str(found[0].row["label"]), _WIDTH), one_line(found[0].text, _WIDTH)
    name = run.settings().get("label_key", ("label", ""))[0]
    where = f"; the labels stand in the prompts: is --label-key {name!r} the answer's column?" if asked else ""
    return f": for instance label {label!r}, answer {answer!r}{where}"
