"""Columns of train data, one entry per sample, that are made of several fields; called by `rollout/batch.py`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from slime_core.errors import RolloutError
from slime_core.multimodal import IMAGES, TrainInputs
from slime_core.sample.provenance import NOT_SAMPLED
from slime_core.sample.routed_experts import RoutedExperts
from slime_core.sample.sample import Sample


def fill_ids(ids: Sequence[int | None]) -> list[int]:
    """Replace every None by a number of its own: the smallest unused numbers, in order."""
    used = {i for i in ids if i is not None}
    unused = (number for number in itertools.count() if number not in used)
    return [next(unused) if i is None else i for i in ids]


def mask_sums(loss_masks: Sequence[Sequence[int]], rollout_ids: Sequence[int]) -> list[int]:
    """Return [n] the unmasked tokens of all samples that share each sample's rollout id."""
    totals = Counter[int]()
    for mask, rollout in zip(loss_masks, rollout_ids):
        totals[rollout] += sum(mask)
    return [totals[rollout] for rollout in rollout_ids]


def version_column(samples: Sequence[Sample], lengths: Sequence[int], newest: int) -> list[list[int]] | None:
    """Return the weight version that sampled each token; None if all are `newest`.

    If a sample has only the versions of its engine calls, its oldest version counts. If it has none, it counts as
    newest.
    """
    rows = []
    for sample, length in zip(samples, lengths):
        versions = list(sample.token_weight_versions or ())
        rows.append(versions if len(versions) == length else [sample.oldest_version(newest)] * length)
    return rows if any(version not in (newest, NOT_SAMPLED) for row in rows for version in row) else None


def routed_column(samples: Sequence[Sample], num_tokens: Sequence[int]) -> list[RoutedExperts | None] | None:
    """Return each sample's routed experts; None for a row with other tokens; None for the column if no sample has any.

    Raises:
        RolloutError: A sample's `rollout_routed_experts` is not [tokens, layers, top_k].
    """
    column: list[RoutedExperts | None] = []
    for sample, count in zip(samples, num_tokens):
        try:
            value = sample.rollout_routed_experts
            routed = None if value is None or not count else RoutedExperts.of(value)
        except ValueError as error:
            raise RolloutError(f"sample {sample.index}: rollout_routed_experts: {error}") from error
        column.append(routed if routed is not None and len(routed) == count - 1 else None)
    return column if any(routed is not None for routed in column) else None


def sampling_mask_columns(
    samples: Sequence[Sample], loss_masks: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return ids and offsets of the tokens among which each response token was sampled; empty for untrained rows.

    Raises:
        RolloutError: A trained row has no sample with this information.
    """
    columns = []
    for row, mask in enumerate(loss_masks):
        ids, offsets = [], [0] * (len(mask) + 1)
        if any(mask):
            sample = samples[row] if len(samples) == len(loss_masks) else Sample()
            told = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
            ids, offsets = ([] if column is None else list(map(int, column)) for column in told)
            if len(offsets) != len(mask) + 1:
                raise RolloutError(
                    f"--use-sampling-mask: sample {sample.index} lacks the ids among which its tokens were sampled; a"
                    " generate function must call append_response_tokens(meta_info=...), and SGLang returns the ids for"
                    " a finite top_k only"
                )
        columns.append((ids, offsets))
    return [ids for ids, _ in columns], [offsets for _, offsets in columns]


def multimodal_column(samples: Sequence[Sample], without: Sequence[bool]) -> list[TrainInputs | None] | None:
    """Return each sample's train inputs; None for an untrained row; None for the column if no sample has any.

    Raises:
        RolloutError: `multimodal_train_inputs` is not a mapping of arrays, or is missing from a sample with images.
    """
    column: list[TrainInputs | None] = []
    for sample, none in zip(samples, without):
        value = None if none else sample.multimodal_train_inputs
        if value is None and (sample.multimodal_inputs or {}).get(IMAGES) and not none:
            raise RolloutError(
                f"sample {sample.index} has multimodal_inputs but no multimodal_train_inputs, so a trainer cannot see"
                " its images"
            )
        try:
            column.append(None if value is None else TrainInputs.of(value))
        except ValueError as error:
            raise RolloutError(f"sample {sample.index}: {error}") from error
    return column if any(value is not None for value in column) else None
