"""A rollout's samples -> incidents: groups, prompts, text and rewards, before they are a batch."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from slime_core import Sample, SampleStatus, TrainBatch
from slime_hook_invariants.incident import Incident, foreign_tokens

_FEW = 2


def sample_incidents(samples: Sequence[Sample]) -> Iterator[Incident]:
    """What does not hold of a rollout's samples."""
    groups: dict[int | None, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_index].append(sample)
    yield from _mixed(groups)
    yield from _failed(samples)
    yield from _doubled_start(samples)
    yield from _answers(groups)


def tokens_that_may_train(samples: Sequence[Sample]) -> Counter[int | None]:
    """Sample -> how many of its tokens its mask trains; parts of one sample together."""
    found: Counter[int | None] = Counter()
    for sample in samples:
        found[sample.index] += 0 if sample.is_removed else sample.effective_response_length
    return found


def sampled_among(samples: Sequence[Sample], vocab_size: int) -> dict[str, float]:
    """Of the tokens that were drawn from a part of the vocabulary: its ids in the mean, and as a share of all."""
    offsets = [sample.rollout_top_p_token_offsets or () for sample in samples]
    sizes = [after - before for row in offsets for before, after in itertools.pairwise(row) if after > before]
    if not sizes:
        return {}
    mean = math.fsum(sizes) / len(sizes)
    return {"rollout/sampled_among": mean, "rollout/sampled_among_share": mean / vocab_size}


def trained_as_sampled(may_train: Mapping[int | None, int], batch: TrainBatch) -> Iterator[Incident]:
    """No more trains of a sample than its mask says; of samples that are not known, nothing is."""
    trains: Counter[int] = Counter()
    for index, mask in zip(batch.sample_indices, batch.loss_masks):
        trains[index] += sum(mask)
    foreign = sum(max(count - may_train[index], 0) for index, count in trains.items() if index in may_train)
    if foreign:
        yield foreign_tokens(foreign)


def _mixed(groups: dict[int | None, list[Sample]]) -> Iterator[Incident]:
    for number, members in groups.items():
        rows = {sample.row for sample in members}
        labels = {repr(sample.label) for sample in members}
        if number is not None and (len(rows) > 1 or len(labels) > 1):
            yield Incident(
                "group_of_one_prompt",
                "a group mixes prompts: group numbers were given out again after a drop, or samples regrouped",
                f"group {number} has samples of rows {sorted(map(str, rows))}, {len(labels)} labels",
            )
            return


def _failed(samples: Sequence[Sample]) -> Iterator[Incident]:
    scored = [s for s in samples if s.status == SampleStatus.FAILED and s.reward is not None and not s.remove_sample]
    if scored:
        yield Incident(
            "failed_not_scored",
            "failed samples are scored and train as if the model had answered so",
            f"{len(scored)} of {len(samples)} samples failed and have a reward, the first {scored[0].reward!r:.40}",
        )


def _doubled_start(samples: Sequence[Sample]) -> Iterator[Incident]:
    starts = {tuple(s.tokens[:2]) for s in samples if len(s.prompt_tokens) > 1}
    prompts = {tuple(s.prompt_tokens) for s in samples}
    if len(prompts) > 1 and len(starts) == 1 and len(set(next(iter(starts)))) == 1:
        yield Incident(
            "one_start_token",
            "prompts begin with their first token twice: the tokenizer adds a BOS to a template that has one",
            f"all {len(prompts)} prompts begin with token {next(iter(starts))[0]} twice",
        )


def _answers(groups: dict[int | None, list[Sample]]) -> Iterator[Incident]:
    """One list of tokens has one text, and, after one prompt, one reward."""
    texts = rewards = 0
    for members in groups.values():
        first: dict[tuple[int, ...], Sample] = {}
        for sample in members:
            if not sample.response_length or sample.is_removed:
                continue
            same = first.setdefault(tuple(sample.tokens), sample)
            texts += same.response != sample.response
            rewards += same.reward != sample.reward and same.response == sample.response
    if texts >= _FEW:
        yield Incident(
            "text_of_the_tokens",
            "the text that is scored is not that of the tokens that are trained on: texts and samples are mispaired,"
            " or another tokenizer decodes",
            f"{texts} samples have another text than a sample of the same tokens",
        )
    if rewards >= _FEW:
        yield Incident(
            "reward_of_the_answer",
            "equal answers to one prompt have different rewards: rewards are paired with other samples, or the grader"
            " is random",
            f"{rewards} samples have another reward than an equal answer in their group",
        )
