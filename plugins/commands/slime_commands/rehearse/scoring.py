"""Score rows of the data with answers that differ, and ask the dynamic filter about the groups.

A random model's answers are all wrong, so a run with it does not say whether a reward tells answers apart. Here a row
gets its label in the formats that rewards read, wrong labels and no answer; rows are spread over the data.
"""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_core.config import Settings
from slime_core.data.dataset import open_rows
from slime_core.data.rows import Columns, PromptReader
from slime_core.data.tokenizer import load_tokenizer
from slime_core.errors import DataError, SlimeError
from slime_core.launch.prepare import Prepared
from slime_core.protocols import Args
from slime_core.protocols.command import Level
from slime_core.rollout.fate import FilterStage
from slime_core.rollout.reward import RewardStage
from slime_core.sample import Sample, SampleStatus

MOST_ROWS = 512
COMPARED_ROWS = 32
"""Rows of which all answers are scored; of further rows one answer is."""
SECONDS = 15.0
"""Seconds after which no further row is scored."""
SLOW_S = 2.0
"""Mean seconds of a call from which the reward is reported as slow."""
MOST_TURNS = 64
"""Turns of an environment after which it counts as one that does not end."""
_RIGHT = (
    "<think>\n</think>\n\\boxed{{{}}}",
    "{}",
    r"\boxed{{{}}}",
    "Answer: {}",
    "#### {}",
    "<answer>{}</answer>",
    "The answer is {}.",
)
_WRONG = ("", "I do not know.", r"\boxed{-7919}", "Answer: -7919", "0")
ANSWERS = len(_RIGHT) + len(_WRONG)


@dataclass
class Scores:
    """Rewards of rows."""

    rows: int = 0
    """Rows that were scored."""
    total: int = 0
    """Rows of the data."""
    failed: list[tuple[int, str]] = field(default_factory=list)
    """(row, error) of each row whose reward failed."""
    unread: list[tuple[int, str]] = field(default_factory=list)
    """(row, error) of each row that cannot be read."""
    values: set[Any] = field(default_factory=set)
    compared: int = 0
    """Rows of which all answers were scored."""
    distinct: int = 0
    """Rows for which not all answers got the same reward."""
    inverted: int = 0
    """Rows for which the best right answer got less than the best wrong one."""
    kept: int = 0
    """Groups that the dynamic filter kept."""
    judged: int = 0
    """Groups with different rewards that the filter was asked about."""
    filter_error: str = ""
    seconds: float = 0.0
    """Mean seconds of an answer."""

    def problems(self, settings: Settings) -> Iterator[tuple[Level, str, int]]:
        """Yield (level, text, rollouts that a run does before)."""
        args = settings.args
        per_rollout = args.rollout_batch_size or 1
        for bad, what in ((self.unread, "cannot be read"), (self.failed, "cannot be scored")):
            if bad:
                number, error = bad[0]
                more = f"; {len(bad)} of {self.rows} rows" if len(bad) > 1 else ""
                whole = bad is self.unread or len(bad) == self.rows
                text = f"row {number + 1} of {args.prompt_data} {what}: {error}{more}"
                yield Level.ERROR if whole else Level.WARNING, text, number // per_rollout
        reward = settings.cite("custom_rm_path" if args.custom_rm_path else "rm_type")
        filter_named = args.dynamic_sampling_filter_path is not None
        if self.compared and not self.distinct:
            paid = " or ".join(sorted(map(str, self.values))[:3])
            text = f"{reward}: every answer to {self.compared} rows, right or wrong, gets {paid}: nothing is learned"
            yield Level.ERROR if filter_named else Level.WARNING, text, 0
        if self.compared and self.inverted == self.compared:
            text = f"{reward}: pays wrong answers more than right ones in each of {self.compared} rows"
            yield Level.WARNING, text, 0
        if self.filter_error:
            yield Level.ERROR, self.filter_error, 0
        elif self.judged and not self.kept:
            cited = settings.cite("dynamic_sampling_filter_path")
            text = f"{cited}: keeps none of {self.judged} groups with different rewards, so a rollout never fills"
            yield Level.ERROR, text, 0
        if self.seconds > SLOW_S:
            yield Level.WARNING, f"{reward}: {self.seconds:.1f} s an answer", 0


def score_rows(run: Prepared) -> Scores:
    """Score rows of `--prompt-data`. Raises SlimeError if the reward or the data cannot be used at all."""
    args = run.args
    rewards = RewardStage(args, run.parts.reward, run.resolver.reward, workers=run.resolver)
    filters = FilterStage(args, run.parts.dynamic_filter, run.parts.dynamic_filter_name)
    tokenizer = load_tokenizer(args.hf_checkpoint)
    rows = open_rows(args.prompt_data)
    try:
        reader = PromptReader(rows, tokenizer, Columns.of_run(args), args.prompt_data)
        return asyncio.run(_score(args, rewards, filters, tokenizer, reader, len(rows)))
    finally:
        rows.close()
        rewards.close()


async def _score(
    args: Args, rewards: RewardStage, filters: FilterStage, tokenizer: Any, reader: PromptReader, total: int
) -> Scores:
    scores = Scores(total=total)
    await rewards.start()
    numbers = list(range(0, total, max(1, total // MOST_ROWS)))
    random.Random(0).shuffle(numbers)
    began, calls = time.monotonic(), 0
    for number in numbers:
        if time.monotonic() - began > SECONDS:
            break
        try:
            sample = reader.read(number)
        except (DataError, SlimeError) as error:
            scores.unread.append((number, str(error)))
            continue
        if sample is None:
            continue
        group = _answers(sample, tokenizer, number)
        group = group if scores.rows < COMPARED_ROWS else group[:1]
        calls += len(group)
        await rewards.score(group, rollout_id=0)
        scores.rows += 1
        failed = [s for s in group if s.status == SampleStatus.FAILED]
        if failed:
            scores.failed.append((number, str(failed[0].metadata.get("failure", {}).get("error", "failed"))))
            continue
        if len(group) > 1:
            _count(scores, args, filters, group)
    scores.seconds = (time.monotonic() - began) / max(1, calls)
    scores.failed.sort()
    scores.unread.sort()
    return scores


async def _play(args: Args, sample: Sample) -> tuple[int, bool]:
    """Play an episode of a sample's environment; return its turns, and whether it ended. Raises SlimeError."""
    from slime_environments.session import EnvironmentSession

    from slime_core.protocols.environment import Turn

    most = min(MOST_TURNS, args.max_turns or MOST_TURNS)
    session = await EnvironmentSession.open(args, sample)
    try:
        await session.reset(sample)
        for number in range(most):
            text = str(sample.label) if sample.label is not None else "42"
            step = await session.step(text, Turn(number, text, [0], "stop"))
            if step.done:
                return number + 1, True
        return most, args.max_turns is not None and args.max_turns <= most
    finally:
        await session.close()


def play(run: Prepared) -> tuple[int, bool]:
    """Play the environment of the first row of `--prompt-data`. As `_play`."""
    args = run.args
    rows = open_rows(args.prompt_data)
    try:
        reader = PromptReader(rows, load_tokenizer(args.hf_checkpoint), Columns.of_run(args), args.prompt_data)
        sample = next(filter(None, map(reader.read, range(len(rows)))), Sample())
    finally:
        rows.close()
    sample.group_index = sample.index = 0
    return asyncio.run(_play(args, sample))


def _answers(sample: Sample, tokenizer: Any, number: int) -> list[Sample]:
    label = sample.label if isinstance(sample.label, (str, int, float)) else "42"
    texts = [*(form.format(label) for form in _RIGHT), *_WRONG]
    return [_answered(sample, tokenizer, text, number, place) for place, text in enumerate(texts)]


def _answered(sample: Sample, tokenizer: Any, text: str, number: int, place: int) -> Sample:
    answered = copy.deepcopy(sample)
    answered.group_index, answered.index = number, number * ANSWERS + place
    answered.session_id = f"rehearsal-{answered.index}"
    tokens = tokenizer.encode(text, add_special_tokens=False) or [0]
    answered.append_response_tokens(None, tokens, [-0.5] * len(tokens), text=text)
    answered.status = SampleStatus.COMPLETED
    return answered


def _count(scores: Scores, args: Args, filters: FilterStage, group: Sequence[Sample]) -> None:
    values = [_value(sample.reward, args.reward_key) for sample in group]
    scores.compared += 1
    scores.values |= set(values)
    if len(set(values)) < 2:
        return
    scores.distinct += 1
    scores.inverted += group[0].label is not None and max(values[: len(_RIGHT)]) < max(values[len(_RIGHT) :])
    if args.dynamic_sampling_filter_path is None or scores.filter_error:
        return
    high = max(range(len(values)), key=lambda i: values[i])
    low = min(range(len(values)), key=lambda i: values[i])
    size = max(2, args.n_samples_per_prompt)
    mixed = [copy.deepcopy(group[high if i % 2 else low]) for i in range(size)]
    scores.judged += 1
    try:
        scores.kept += filters.decide(mixed).keep
    except SlimeError as error:
        scores.filter_error = str(error)


def _value(reward: Any, key: str | None) -> Any:
    if isinstance(reward, dict):
        return reward.get(key) if key else tuple(sorted(reward.items()))
    return reward
