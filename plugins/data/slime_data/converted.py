"""Check the train data that a user's function made of samples, and convert it to a `TrainBatch`.

`rollout.batch` calls this (entry-point group `slime.data`) if `--custom-convert-samples-to-train-data-path` is set. The
dictionary is THUDM/slime's. Its rewards are final: the function computes any group statistics itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.errors import RolloutError
from slime_core.sample import Sample, TrainBatch
from slime_core.sample.columns import fill_ids, mask_sums, routed_column, version_column
from slime_core.sample.routed_experts import RoutedExperts

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
