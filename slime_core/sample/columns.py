"""Columns of train data, one entry per sample: fill in ids, and check a dictionary that a user's function made.

Called by `rollout/batch.py`. The dictionary is THUDM/slime's train data, as its hook
`--custom-convert-samples-to-train-data-path` returns it. Its rewards are final: the function computes any group
statistics itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.errors import RolloutError
from slime_core.multimodal import IMAGES, TrainInputs
from slime_core.sample.provenance import NOT_SAMPLED
from slime_core.sample.routed_experts import RoutedExperts
from slime_core.sample.sample import Sample
from slime_core.sample.types import TrainBatch

REQUIRED = ("tokens", "response_lengths", "rewards", "loss_masks")
"""Required columns, which have no default."""

_TOKEN_COLUMNS = ("loss_masks", "rollout_log_probs", "teacher_log_probs", "token_weight_versions")
_RENAMED = {
    "raw_reward": "raw_rewards",
    "metadata": "train_metadata",
    "rollout_routed_experts": "routed_experts",
}
_KNOWN = {
    *REQUIRED,
    *("raw_rewards", "truncated", "sample_indices", "group_indices", "rollout_ids", "rollout_mask_sums"),
    *("rollout_log_probs", "teacher_log_probs", "source_names", "train_metadata", "token_weight_versions"),
    *("routed_experts", "multimodal_train_inputs"),
}
_DERIVED = {"total_lengths", "rollout_id"}


def fill_ids(ids: Sequence[int | None]) -> list[int]:
    """Replace every None by a number of its own: the smallest unused numbers, in order."""
    used = {i for i in ids if i is not None}
    filled: list[int] = []
    free = 0
    for value in ids:
        while value is None and free in used:
            free += 1
        filled.append(free if value is None else value)
        used.add(filled[-1])
    return filled


def mask_sums(loss_masks: Sequence[Sequence[int]], rollout_ids: Sequence[int]) -> list[int]:
    """Return [n] the unmasked tokens of all samples that share each sample's rollout id."""
    totals: dict[int, int] = defaultdict(int)
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
        versions = list(sample.token_weight_versions)
        numbers = [int(v) for v in sample.weight_versions if v.isdecimal()]
        rows.append(versions if len(versions) == length else [min(numbers, default=newest)] * length)
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
                    f"--use-sampling-mask: sample {sample.index} does not say what its tokens were sampled among;"
                    " generate functions append_response_tokens(meta_info=...); SGLang has it for a finite top_k only"
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


def batch_from_columns(
    rollout_id: int, samples: Sequence[Sample], columns: Mapping[str, Any], weight_version: int = 0
) -> TrainBatch:
    """Convert a user's dictionary of columns to a `TrainBatch`.

    Missing `rollout_ids`, `group_indices`, `sample_indices` and `truncated` come from the samples if there is one row
    per sample; otherwise ids are counted up. Unknown columns go to `extras`.

    Raises:
        RolloutError: A required column is missing, or columns or rows differ in length.
    """
    origin = "--custom-convert-samples-to-train-data-path"
    table = _as_table(origin, columns)
    n = len(table["tokens"])
    aligned = list(samples) if len(samples) == n else [Sample() for _ in range(n)]
    rollout_ids = table.get("rollout_ids") or fill_ids([s.rollout_id for s in aligned])
    masks = [[int(m) for m in mask] for mask in table["loss_masks"]]
    batch = TrainBatch(
        rollout_id=rollout_id,
        tokens=table["tokens"],
        response_lengths=[int(length) for length in table["response_lengths"]],
        loss_masks=masks,
        rewards=[float(r) for r in table["rewards"]],
        raw_rewards=[float(r) for r in table.get("raw_rewards") or table["rewards"]],
        truncated=table.get("truncated") or [int(s.status == s.Status.TRUNCATED) for s in aligned],
        sample_indices=table.get("sample_indices") or fill_ids([s.index for s in aligned]),
        group_indices=table.get("group_indices") or fill_ids([s.group_index for s in aligned]),
        rollout_ids=rollout_ids,
        rollout_mask_sums=table.get("rollout_mask_sums") or mask_sums(masks, rollout_ids),
        rollout_log_probs=table.get("rollout_log_probs"),
        teacher_log_probs=table.get("teacher_log_probs"),
        source_names=table.get("source_names"),
        train_metadata=table.get("train_metadata"),
        multimodal_train_inputs=table.get("multimodal_train_inputs"),
        token_weight_versions=table.get("token_weight_versions")
        or version_column(aligned, [int(length) for length in table["response_lengths"]], weight_version),
        routed_experts=_routed(origin, table.get("routed_experts"))
        or routed_column(aligned, [len(tokens) for tokens in table["tokens"]]),
        weight_version=weight_version,
        extras={name: values for name, values in table.items() if name not in _KNOWN},
    )
    _check_rows(origin, batch)
    return batch


def _as_table(origin: str, columns: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return plain lists under slime_core's names, all of one length."""
    if not isinstance(columns, Mapping):
        raise RolloutError(f"{origin} returned {type(columns).__name__}; expected a dictionary of columns")
    table = {_RENAMED.get(k, k): _plain(v) for k, v in columns.items() if v is not None and k not in _DERIVED}
    missing = [name for name in REQUIRED if name not in table]
    if missing:
        raise RolloutError(f"{origin}: missing column(s) {', '.join(missing)}; got {', '.join(sorted(columns))}")
    lengths = {name: len(values) for name, values in table.items()}
    if len(set(lengths.values())) > 1 or not lengths["tokens"]:
        raise RolloutError(f"{origin}: every column needs one entry per sample; got lengths {lengths}")
    return table


def _plain(values: Any) -> list[Any]:
    """Return lists of Python numbers from lists, arrays and tensors, one or two levels deep."""
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    return [v.tolist() if hasattr(v, "tolist") else v for v in values]


def _routed(origin: str, column: Sequence[Any] | None) -> list[RoutedExperts | None] | None:
    try:
        return None if column is None else [None if value is None else RoutedExperts.of(value) for value in column]
    except ValueError as error:
        raise RolloutError(f"{origin}: rollout_routed_experts: {error}") from error


def _check_rows(origin: str, batch: TrainBatch) -> None:
    for name in _TOKEN_COLUMNS:
        for row, values in enumerate(getattr(batch, name) or ()):
            if len(values) != batch.response_lengths[row]:
                raise RolloutError(
                    f"{origin}: row {row} of {name} has {len(values)} entries for a response of"
                    f" {batch.response_lengths[row]} tokens"
                )
    for row, routed in enumerate(batch.routed_experts or ()):
        if routed is not None and len(routed) != len(batch.tokens[row]) - 1:
            raise RolloutError(
                f"{origin}: row {row} of rollout_routed_experts has {len(routed)} rows for {len(batch.tokens[row])}"
                " tokens; one for each but the last is needed"
            )
    for row, (tokens, length) in enumerate(zip(batch.tokens, batch.response_lengths)):
        if not 0 < length < len(tokens):
            raise RolloutError(
                f"{origin}: row {row} has response length {length} and {len(tokens)} tokens; both the prompt and the"
                " response need at least one token"
            )
