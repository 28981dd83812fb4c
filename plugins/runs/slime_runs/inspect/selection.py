"""Rejection sampling: select the saved samples worth imitating, and count the reasons for dropping the others.

`slime samples filter` calls `select` with the samples that `slime rollout` saved. The same files and settings give the
same samples in the same order. `best_of` counts executions, not samples: if fan-out made several samples of an
execution, they are kept or dropped together, by the mean of their rewards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime_commands.sft.sampled_rows import reward_of

from slime_core.sample import Group, Sample, SampleStatus
from slime_core.sample.admission import problem
from slime_core.sample.provenance import Source
from slime_core.sample.types import executions, mean


@dataclass(frozen=True)
class Wanted:
    """The conditions that a sample must meet to be kept."""

    min_reward: float | None = None
    reward_key: str | None = None
    """Key of the reward, if rewards are mappings."""
    best_of_group: int | None = None
    """Number of executions to keep per prompt, highest reward first, ties in the file's order."""
    truncated: bool = False
    """Keep samples that were cut at the token limit."""
    max_response_tokens: int | None = None
    dedupe: bool = False
    """Keep only the first of the samples with the same tokens."""


@dataclass
class Selection:
    """The result of a selection."""

    kept: list[Sample] = field(default_factory=list)
    """Samples that are kept, in the order of the files."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> number of samples."""
    groups: int = 0
    """Number of prompts."""
    groups_kept: int = 0
    """Number of prompts with at least one kept sample."""

    @property
    def total(self) -> int:
        """Number of samples examined."""
        return len(self.kept) + self.left_out.total()


def select(files: Iterable[tuple[Path, Sequence[Sample]]], wanted: Wanted) -> Selection:
    """Return the samples to keep; for each other sample count the first reason that applies.

    Args:
        files: Path and samples. Samples of one directory and `group_index` are one group.
        wanted: The settings.

    Raises:
        DataError: Rewards are mappings and `reward_key` names none of their numbers.
    """
    groups: dict[Hashable, Group] = {}
    for path, samples in files:
        for place, sample in enumerate(samples):
            alone = (str(path), place) if sample.group_index is None else None
            groups.setdefault((str(path.parent), sample.group_index, alone), []).append(sample)
    found = Selection(groups=len(groups))
    seen: set[tuple[int, ...]] = set()
    for group in groups.values():
        chosen = _best(group, wanted, found.left_out, seen)
        found.kept += chosen
        found.groups_kept += bool(chosen)
    return found


def _best(group: Group, wanted: Wanted, left_out: Counter[str], seen: set[tuple[int, ...]]) -> list[Sample]:
    """Return the samples of a prompt to keep, in their order; add the tokens of every acceptable sample to `seen`."""
    able = []
    for sample in group:
        reason, tokens = why_not(sample, wanted), tuple(sample.tokens)
        if reason is None and wanted.dedupe and tokens in seen:
            reason = "the same tokens as one before"
        if reason is None:
            seen.add(tokens)
            able.append(sample)
        else:
            left_out[reason] += 1
    if wanted.best_of_group is None:
        return able
    tried = executions(able)
    order = sorted(range(len(tried)), key=lambda i: -_mean_reward(tried[i], wanted.reward_key))
    best = {id(sample) for i in order[: wanted.best_of_group] for sample in tried[i]}
    dropped = len(able) - len(best)
    if dropped:
        left_out[f"not among the best {wanted.best_of_group} of the prompt"] += dropped
    return [sample for sample in able if id(sample) in best]


def why_not(sample: Sample, wanted: Wanted) -> str | None:
    """Return the reason to drop a sample independently of its group, or None if the sample is acceptable."""
    if sample.status in (SampleStatus.FAILED, SampleStatus.ABORTED, SampleStatus.PENDING):
        return f"status {sample.status.value}"
    if sample.remove_sample:
        return "taken out by a filter of the rollout (remove_sample)"
    if sample.status == SampleStatus.TRUNCATED and not wanted.truncated:
        return "cut at the token limit"
    reward = reward_of(sample, wanted.reward_key)
    if reward is None or reward != reward:
        return "no reward"
    if wanted.min_reward is not None and reward < wanted.min_reward:
        return f"reward below {wanted.min_reward:g}"
    if wanted.max_response_tokens is not None and sample.response_length > wanted.max_response_tokens:
        return f"more than {wanted.max_response_tokens} response tokens"
    broken = problem(sample)
    if broken is not None:
        return f"tokens that do not fit: {broken}"
    spans = sample.known_spans()
    if not any(span.source == Source.SAMPLED and span.trained for span in spans):
        return "nothing in it is trained on"
    return None


def _mean_reward(siblings: Sequence[Sample], key: str | None) -> float:
    return mean([reward_of(sample, key) or 0.0 for sample in siblings])
