"""Finished groups -> `TrainBatch`, one row per sample, rewards shaped by the estimator.

The rollout stage calls it with the groups of a rollout. A sample that cannot be trained on (removed by a filter, failed
without a reward, or refused by `sample.admission`) keeps its row, so that batch sizes match the configuration. Its mask
is zero *and* its reward is outside the group statistics (THUDM/slime includes it).

Missing ids get the smallest unused numbers. A sample without response tokens becomes a placeholder row, one masked
response token after one prompt token, so no later stage sees an empty response.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from slime_core.distributions import provided
from slime_core.errors import RolloutError, rollout_name
from slime_core.multimodal import image_token_of
from slime_core.protocols import AdvantageEstimator, Args, RewardInputs
from slime_core.rollout.reward import number_problem
from slime_core.sample import LARGEST_SCORE, Group, Sample, SampleStatus, TrainBatch, is_score
from slime_core.sample.admission import Sealed, admit
from slime_core.sample.columns import (
    fill_ids,
    mask_sums,
    multimodal_column,
    routed_column,
    sampling_mask_columns,
    version_column,
)
from slime_core.sample.provenance import Source, TurnSpan, digest

RewardPostProcess = Callable[[Args, list[Sample]], tuple[Sequence[float], Sequence[float]]]
"""Function of `--custom-reward-post-process-path`: trainable samples -> (raw rewards, shaped rewards)."""

ConvertSamples = Callable[[Args, list[Sample]], Mapping[str, object]]
"""Function of `--custom-convert-samples-to-train-data-path`: all samples -> THUDM/slime's train data columns."""

_T = TypeVar("_T")
logger = logging.getLogger(__name__)


def make_batch(
    args: Args,
    rollout_id: int,
    groups: Iterable[Group],
    estimator: AdvantageEstimator | None,
    *,
    post_process_rewards: RewardPostProcess | None = None,
    convert_samples: ConvertSamples | None = None,
    weight_version: int = 0,
) -> TrainBatch:
    """Flatten the groups and shape their rewards.

    Args:
        args: The run's settings; `reward_key` picks from mapping rewards.
        rollout_id: Number of the rollout, for the batch and for messages.
        groups: The rollout's groups, with fan-out siblings in place (`rollout.stage.flatten`).
        estimator: Its `shape_rewards` sees the trainable samples of the whole rollout; None leaves rewards as they are.
        post_process_rewards: Replaces `shape_rewards`; gets the trainable samples only.
        convert_samples: Replaces everything here, reward shaping included; gets all samples.
        weight_version: Newest version of the weights, which this batch will update.

    Raises:
        RolloutError: No samples; admission refuses all of them; a missing or non-finite reward; or a column
            that only some of the trainable samples have.
    """
    lists = list(groups)
    samples = [sample for members in lists for sample in members]
    if not samples:
        raise RolloutError(f"{rollout_name(rollout_id)} returned no samples; nothing to train on")
    refuse_bad(args, rollout_id, samples)
    for sample in samples:
        sample.note_components(args.reward_key)
    if convert_samples is not None:
        convert = provided("slime.data", "converted").batch_from_columns
        return _masked(args, samples, convert(rollout_id, samples, convert_samples(args, samples), weight_version))
    rollout_ids = fill_ids([s.rollout_id for s in samples])
    rows = [_Row(*each) for each in zip(samples, rollout_ids, _group_indices(lists))]
    _shape(args, [row for row in rows if not row.removed], estimator, post_process_rewards)
    masks = [row.loss_mask for row in rows]
    batch = TrainBatch(
        rollout_id=rollout_id,
        tokens=[row.tokens for row in rows],
        response_lengths=[len(mask) for mask in masks],
        loss_masks=masks,
        rewards=[row.reward for row in rows],
        raw_rewards=[row.raw_reward for row in rows],
        truncated=[int(s.status == SampleStatus.TRUNCATED) for s in samples],
        sample_indices=fill_ids([s.index for s in samples]),
        group_indices=[row.group_index for row in rows],
        rollout_ids=rollout_ids,
        rollout_mask_sums=mask_sums(masks, rollout_ids),
        rollout_log_probs=_token_column("rollout_log_probs", rows),
        teacher_log_probs=_token_column("teacher_log_probs", rows),
        components=[sample.reward_components or {} for sample in samples],
        turns=[row.turns for row in rows],
        turn_rewards=[row.turn_rewards for row in rows],
        source_names=_optional([s.metadata.get("source_name") for s in samples]),
        train_metadata=_optional([s.train_metadata for s in samples]),
        token_weight_versions=version_column(samples, [len(mask) for mask in masks], weight_version),
        routed_experts=routed_column(samples, [0 if row.placeholder else len(row.tokens) for row in rows]),
        multimodal_train_inputs=multimodal_column(samples, [row.placeholder or row.removed for row in rows]),
        weight_version=weight_version,
    )
    return _masked(args, samples, batch)


def _masked(args: Args, samples: Sequence[Sample], batch: TrainBatch) -> TrainBatch:
    """Add the columns of the sampling mask if the run uses it; a user's columns take precedence."""
    if args.use_sampling_mask:
        own = [batch.extras.pop(f"rollout_top_p_token_{name}", None) for name in ("ids", "offsets")]
        columns = own if None not in own else sampling_mask_columns(samples, batch.loss_masks)
        batch.rollout_top_p_token_ids, batch.rollout_top_p_token_offsets = columns
    return batch


def refuse_bad(args: Args, rollout_id: int, samples: Sequence[Sample]) -> None:
    """Admit samples and mark refused ones as failed, with a warning. Raises RolloutError if all are refused."""
    refused = admit(samples, image_token_of(args.hf_checkpoint))
    for sample in samples:
        value = sample.reward.get(args.reward_key or "") if isinstance(sample.reward, Mapping) else sample.reward
        if isinstance(value, (int, float)) and not is_score(value) and not sample.is_removed:
            sample.fail("reward", f"its reward {number_problem(value)}")
            refused.append(sample)
    if not refused:
        return
    first = refused[0]
    reason = f"sample {first.index}: {first.metadata['failure']['error']}"
    if len(refused) == len(samples):
        raise RolloutError(f"{rollout_name(rollout_id)}: cannot train on any of its {len(samples)} samples; {reason}")
    logger.warning(
        "%s: %d of %d samples cannot be trained on and count as failed; %s",
        rollout_name(rollout_id), len(refused), len(samples), reason,
    )  # fmt: skip


# -- samples and groups ----------------------------------------------------------------------------------


def _group_indices(lists: Sequence[Sequence[Sample]]) -> list[int]:
    """Return the samples' group indices, [n]; a list of samples without an index gets an unused number."""
    named = [sorted({s.group_index for s in members if s.group_index is not None}) for members in lists]
    for members, names in zip(lists, named):
        if len(names) > 1 and any(s.group_index is None for s in members):
            raise RolloutError(f"samples without group_index in a list that mixes the groups {names}; set it on all")
    used = [name for names in named for name in names]
    blanks = iter(fill_ids([*used, *(None for names in named if not names)])[len(used) :])
    defaults = [names[0] if names else next(blanks) for names in named]
    return [
        default if s.group_index is None else s.group_index
        for members, default in zip(lists, defaults)
        for s in members
    ]


def _compared(args: Args, rows: Sequence[_Row]) -> list[int]:
    """Return the number of the group that each row is compared with: its prompt's, of its own adapter alone."""
    if not args.lora_adapters:
        return [row.group_index for row in rows]
    keys = [(row.group_index, (row.sample.train_metadata or {}).get("adapter")) for row in rows]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


# -- rows ------------------------------------------------------------------------------------------------


class _Row:
    """The batch's entries of one sample."""

    def __init__(self, sample: Sample, rollout_id: int, group_index: int) -> None:
        self.sample, self.rollout_id, self.group_index = sample, rollout_id, group_index
        self.removed = sample.is_removed
        """True if the sample is outside the group statistics."""
        length = sample.response_length
        self.placeholder = length == 0 or (self.removed and length == len(sample.tokens))
        """True if the sample has no response and the row only keeps its place."""
        self.tokens, self.loss_mask = list(sample.tokens), [0] * length
        if self.placeholder:
            self.tokens, self.loss_mask = [*(sample.tokens[-1:] or [0]), 0], [0]
        elif not self.removed:
            self.loss_mask = list(sample.loss_mask or ())  # complete since `admit`
        self.turns = self._turns()
        self.reward = self.raw_reward = 0.0
        self.turn_rewards = [0.0] * len(self.turns)

    def _turns(self) -> list[TurnSpan]:
        """Return the turns of the response, each with the id of its state; one turn if it is not trained on."""
        if self.placeholder or self.removed:
            return [TurnSpan(0, len(self.loss_mask))]
        turns, seen, start = self.sample.known_turns(), 0, len(self.tokens) - len(self.loss_mask)
        for place, turn in enumerate(turns):
            shown = self.tokens[seen : start + turn.first]
            turns[place] = turn if turn.state is not None else turn._replace(state=f"{digest(shown):x}")
            seen = start + turn.last
        return turns


def _token_column(field: str, rows: Sequence[_Row]) -> list[list[float]] | None:
    """Return the field of every sample, zeros on untrained rows; None if no trainable sample has the field."""
    needed = [row for row in rows if any(row.loss_mask)]
    missing = [row for row in needed if getattr(row.sample, field) is None]
    unknowable = field == "rollout_log_probs" and all(_from_text(row.sample) for row in missing)
    if len(missing) == len(needed) or (missing and unknowable):
        return None
    if missing:
        names = [row.sample.index for row in missing[:8]]
        raise RolloutError(
            f"{field} is set on {len(needed) - len(missing)} of {len(needed)} trainable samples but not on samples"
            f" {names}; set it on all or on none"
        )
    return [
        [0.0] * len(row.loss_mask)
        if row.placeholder or row.removed or getattr(row.sample, field) is None
        else [float(v) for v in getattr(row.sample, field)]
        for row in rows
    ]


def _from_text(sample: Sample) -> bool:
    """Return whether the response was given as text, so that its tokens' log-probs are unknown."""
    return any(span.source == Source.TEXT for span in sample.spans or ())


def _optional(column: list[_T | None]) -> list[_T | None] | None:
    """Return the column, or None if no sample has a value."""
    return column if any(value is not None for value in column) else None


# -- rewards ---------------------------------------------------------------------------------------------


def _shape(
    args: Args, rows: Sequence[_Row], estimator: AdvantageEstimator | None, post_process: RewardPostProcess | None
) -> None:
    """Set the rewards of the trainable rows, and of their turns."""
    samples = [row.sample for row in rows]
    if post_process is not None:
        source = "--custom-reward-post-process-path"
        sealed = Sealed(samples)
        raw, shaped = post_process(args, list(samples))
        sealed.check(source, advice="")
    else:
        source = "reward or metadata['raw_reward']"
        raw, shaped = [_raw_reward(args, s) for s in samples], [_reward(args, s) for s in samples]
    raw = _scores(source, raw, samples)
    if estimator is not None:
        inputs = RewardInputs(
            rewards=list(shaped),
            group_indices=_compared(args, rows),
            rollout_ids=[row.rollout_id for row in rows],
            response_lengths=[sum(row.loss_mask) for row in rows],
            truncated=[s.status == SampleStatus.TRUNCATED for s in samples],
            baselines=_baselines(args, samples, estimator) if post_process is None else None,
            components=[s.reward_components or {} for s in samples],
            turns=[row.turns for row in rows],
            metadata=[s.metadata for s in samples],
        )
        name = type(estimator).__name__
        if post_process is None:
            shaped, source = estimator.shape_rewards(args, inputs), f"{name}.shape_rewards"
        _take_turns(f"{name}.shape_turns", estimator.shape_turns(args, inputs), rows)
    for row, reward, own in zip(rows, _scores(source, shaped, samples), raw):
        row.reward, row.raw_reward = reward, own


def _reward(args: Args, sample: Sample) -> float:
    key = args.reward_key
    if sample.reward is None:
        raise RolloutError(
            f"{_name(sample)} has no reward and is neither failed nor removed; the reward function must score it,"
            " or set sample.remove_sample"
        )
    if isinstance(sample.reward, Mapping) and (not key or key not in sample.reward):
        raise RolloutError(
            f"{_name(sample)}: the reward is a mapping with keys {sorted(sample.reward)}; --reward-key must name one"
            f" of them (got {key!r})"
        )
    try:
        return float(sample.get_reward_value(args))
    except (TypeError, ValueError) as error:
        wanted = f"a mapping with a number for --reward-key {key!r}" if key else "a number"
        raise RolloutError(f"{_name(sample)}: reward {sample.reward!r} is not {wanted}") from error


def _raw_reward(args: Args, sample: Sample) -> float:
    override = sample.metadata.get("raw_reward")
    return _reward(args, sample) if override is None else override


def _baselines(args: Args, samples: Sequence[Sample], estimator: AdvantageEstimator) -> list[float] | None:
    """Return the reward of each sample's greedy baseline, or None if the estimator needs no baseline."""
    if not estimator.needs_greedy_baseline:
        return None
    return list(provided("slime.data", "greedy_baseline").baselines(args, samples, type(estimator).__name__))


def _scores(source: str, rewards: Sequence[float], samples: Sequence[Sample]) -> list[float]:
    """Return a number for each sample. Raises RolloutError for more or fewer values, and for one that is no score."""
    try:
        values = [float(reward) for reward in rewards]
    except (TypeError, ValueError) as error:
        raise RolloutError(f"{source} returned a value that is not a number: {error}") from error
    if len(values) != len(samples):
        raise RolloutError(f"{source} returned {len(values)} rewards for {len(samples)} samples")
    bad = [(sample, value) for sample, value in zip(samples, values) if not is_score(value / 1e3)]
    if bad:
        raise RolloutError(
            f"{source} returned {bad[0][1]} for {_name(bad[0][0])} ({len(bad)} of {len(values)} rewards are like it);"
            f" expected finite numbers of at most {1e3 * LARGEST_SCORE:g} in size"
        )
    return values


def _take_turns(source: str, shaped: Sequence[Sequence[float]], rows: Sequence[_Row]) -> None:
    sizes, expected = [len(values) for values in shaped], [len(row.turns) for row in rows]
    if sizes != expected:
        raise RolloutError(f"{source} returned {sizes[:8]} values for samples of {expected[:8]} turns; one per turn")
    for row, values in zip(rows, shaped):
        row.turn_rewards = [float(value) for value in values]
        if not all(is_score(value / 1e3) for value in row.turn_rewards):
            raise RolloutError(
                f"{source} returned {list(values)[:8]} for the turns of a sample; expected finite numbers"
            )


def _name(sample: Sample) -> str:
    return f"sample {sample.index} (group {sample.group_index}, {sample.status})"
