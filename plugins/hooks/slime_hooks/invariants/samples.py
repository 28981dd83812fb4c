"""Check a rollout's samples before they become a batch: groups, prompts, text and rewards."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slime_core import Args, Sample, SampleStatus, TrainBatch
from slime_hooks.invariants.incident import CENTRED, Incident, foreign_tokens, moments

_FEW = 2
_DECODED, _LONGEST = 8, 256
"""Number of samples whose text is compared, and number of tokens compared of each."""
_BY_CHANCE = -20.0
"""Log-probability below which an event does not happen by chance."""


class Kept(NamedTuple):
    """Values of a rollout's samples, kept until the samples are trained on, by sample index."""

    tokens: Counter[int | None]
    """Number of tokens that the mask trains, summed over the parts of a sample."""
    groups: dict[int | None, int | None]
    rewards: dict[int | None, float]
    """Reward as scored, for samples that have a reward and count in their group."""
    reported: dict[int | None, float]
    """The reported reward: `metadata["raw_reward"]` if set, otherwise the reward as scored."""


def sample_incidents(args: Args, samples: Sequence[Sample]) -> Iterator[Incident]:
    """Yield an incident for each violated invariant of a rollout's samples."""
    groups: dict[int | None, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_index].append(sample)
    yield from _mixed(groups)
    yield from _failed(samples)
    yield from _doubled_start(samples)
    yield from _answers(groups)
    yield from _same_answers(args, groups)
    yield from _decoded(args, samples)


def kept(args: Args, samples: Sequence[Sample]) -> Kept:
    """Return the values that `trained_as_sampled` compares a batch with."""
    found = Kept(Counter(), {}, {}, {})
    parts = Counter(sample.index for sample in samples)
    replaced = bool(args.custom_reward_post_process_path)
    for sample in samples:
        index, removed = sample.index, sample.is_removed
        found.tokens[index] += 0 if removed else sample.effective_response_length
        found.groups[index] = sample.group_index
        reward = None if removed or replaced or parts[index] > 1 else sample.finite_reward(args)
        if reward is not None:
            found.rewards[index] = reward
            found.reported[index] = float(sample.metadata.get("raw_reward", reward))
    return found


def sampled_among(samples: Sequence[Sample], vocab_size: int) -> dict[str, float]:
    """Return the mean number of ids that a token was drawn from, and its share of the vocabulary.

    Only tokens that were drawn from a part of the vocabulary count.
    """
    offsets = [sample.rollout_top_p_token_offsets or () for sample in samples]
    sizes = [after - before for row in offsets for before, after in itertools.pairwise(row) if after > before]
    if not sizes:
        return {}
    mean = math.fsum(sizes) / len(sizes)
    return {"rollout/sampled_among": mean, "rollout/sampled_among_share": mean / vocab_size}


def trained_as_sampled(args: Args, known: Kept, batch: TrainBatch) -> Iterator[Incident]:
    """Compare a batch with its samples: their masks, their groups and their rewards, as far as they are known."""
    trains: Counter[int] = Counter()
    for index, mask in zip(batch.sample_indices, batch.loss_masks):
        trains[index] += sum(mask)
    foreign = sum(max(count - known.tokens[index], 0) for index, count in trains.items() if index in known.tokens)
    if foreign:
        yield foreign_tokens(foreign)
    moved = [i for i, group in zip(batch.sample_indices, batch.group_indices) if known.groups.get(i, group) != group]
    moved = [i for i in moved if known.groups[i] is not None]
    if moved:
        yield Incident(
            "group_of_one_prompt",
            "the groups that rewards are compared in are not the samples' own: samples were shuffled or regrouped after"
            " they were scored",
            f"{len(moved)} of {len(batch)} samples, the first is sample {moved[0]}",
        )
    yield from _rewards_kept(args, known, batch)


def _rewards_kept(args: Args, known: Kept, batch: TrainBatch) -> Iterator[Incident]:
    """Check that the batch has each reward as scored, and a centring estimator's as a line over it per group."""
    cause = (
        "the rewards that train are not those that were scored: they are clipped, rounded, replaced or another sample's"
    )
    groups: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for at, index in enumerate(batch.sample_indices):
        scored = known.reported.get(index)
        if scored is None:
            continue
        if abs(batch.raw_rewards[at] - scored) > 1e-6 * max(1.0, abs(scored)):
            numbers = f"sample {index}: scored {scored:.6g}, in the batch {batch.raw_rewards[at]:.6g}"
            yield Incident("rewards_as_scored", cause, numbers)
            return
        groups[batch.group_indices[at]].append((known.rewards[index], batch.rewards[at]))
    for group, pairs in groups.items() if args.advantage_estimator in CENTRED else ():
        scored_by, shaped = map(list, zip(*pairs))
        spread, own, together = moments(scored_by, shaped)
        if spread <= 1e-4 * max(1.0, *map(abs, scored_by)):
            continue
        if own == 0.0 or 0 < together < 0.999 * spread * own:
            numbers = f"group {group}: scored {scored_by[:4]}, trained on {[round(s, 4) for s in shaped[:4]]}"
            yield Incident("rewards_as_scored", cause, numbers)
            return


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
    if len(starts) != 1 or len(set(next(iter(starts)))) != 1:
        return
    prompts = {tuple(s.prompt_tokens) for s in samples}
    if len(prompts) > 1:
        yield Incident(
            "one_start_token",
            "prompts begin with their first token twice: the tokenizer adds a BOS to a template that has one",
            f"all {len(prompts)} prompts begin with token {next(iter(starts))[0]} twice",
        )


def _answers(groups: dict[int | None, list[Sample]]) -> Iterator[Incident]:
    """Check that equal tokens have equal texts and, after the same prompt and by the same role, equal rewards."""
    texts = rewards = 0
    for members in groups.values():
        first: dict[tuple[object, ...], Sample] = {}
        for sample in members:
            if not sample.response_length or sample.is_removed:
                continue
            same = first.setdefault((sample.metadata.get("role"), *sample.tokens), sample)
            texts += same.response != sample.response
            rewards += same.response == sample.response and _differ(same.reward, sample.reward)
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


def _differ(one: Any, other: Any) -> bool:
    """Return whether two rewards differ by more than rounding."""
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return not math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12) if numbers else one != other


def _same_answers(args: Args, groups: dict[int | None, list[Sample]]) -> Iterator[Incident]:
    """Report groups whose answers are all equal, although their log-probs make that next to impossible."""
    if not args.rollout_temperature or args.rollout_top_k == 1:
        return
    compared, chance = 0, 0.0
    for members in groups.values():
        answered = [s for s in members if s.response_length and not s.is_removed and s.rollout_log_probs]
        first = answered[0] if len(answered) > 1 else None
        if first is None or first.rollout_log_probs is None:
            continue
        if any(s.tokens != first.tokens for s in answered):
            return
        compared += 1
        chance += (len(answered) - 1) * math.fsum(first.rollout_log_probs)
    if compared > 1 and chance < _BY_CHANCE:
        yield Incident(
            "answers_differ",
            "all answers to a prompt are the same: the samples of a group share a seed, or one answer is copied",
            f"in all {compared} groups; by their log-probs the chance is e^{chance:.0f}",
        )


def _decoded(args: Args, samples: Sequence[Sample]) -> Iterator[Incident]:
    """Check that the scored text is the text of the tokens, by the run's own tokenizer."""
    tokenizer = _tokenizer(str(Path(args.hf_checkpoint or "", "tokenizer.json")))
    if args.custom_generate_function_path or args.rollout_function_path or tokenizer is None:
        return
    answered = [s for s in samples if s.response and s.response_length and not s.is_removed]
    chosen = answered[:: max(1, len(answered) // _DECODED)][:_DECODED]
    wrong = [sample for sample in chosen if not _is_text_of(tokenizer, sample)]
    if len(wrong) >= _FEW:
        own = tokenizer.decode(wrong[0].tokens[-wrong[0].response_length :])
        yield Incident(
            "text_of_the_tokens",
            "the text that is scored is not that of the tokens that are trained on: another tokenizer decodes, or texts"
            " and samples are mispaired",
            f"{len(wrong)} of {len(chosen)} samples; the first has {wrong[0].response!r:.80}, its tokens are"
            f" {own!r:.80}",
        )


@functools.cache
def _tokenizer(file: str) -> Any:
    """Read a separate tokenizer, so that changes to the run's tokenizer do not affect it; None without the file."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(file) if Path(file).is_file() else None


def _is_text_of(tokenizer: Any, sample: Sample) -> bool:
    """Return whether text and tokens agree from the start, up to the shorter one, ignoring spaces."""
    ids = sample.tokens[-sample.response_length :][:_LONGEST]
    given = _letters(sample.response)
    for skip in (True, False):
        own = _letters(tokenizer.decode(ids, skip_special_tokens=skip))
        if own.startswith(given) or given.startswith(own):
            return True
    return False


def _letters(text: str) -> str:
    """Return the text up to a character that is cut in its middle, without spaces."""
    return "".join(text.split("\ufffd")[0].split())
