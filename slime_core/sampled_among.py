"""The tokens that each response token of a sample was sampled among, merged over engine calls.

Flat lists, as THUDM/slime's `rollout_top_p_token_ids` and `rollout_top_p_token_offsets`; the trainer makes an
`ops.SamplingMask` of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import TypeAlias

_Kept: TypeAlias = tuple[list[int] | None, list[int] | None]
"""Ids, token after token, and [tokens + 1] where each token's begin; (None, None) where they are not known."""


def kept_after_call(
    kept: _Kept, loss_mask: Sequence[int], tokens: Sequence[int], rows: Sequence[Sequence[int]] | None
) -> _Kept:
    """`kept` after sampled `tokens`; unknown as soon as it is of any sampled token.

    Args:
        kept: Of the response so far.
        loss_mask: Of the response so far; where nothing in it was sampled, `kept` begins.
        tokens: What is appended.
        rows: What each of them was sampled among; an empty row: among all.

    Raises:
        ValueError: The rows are not those of the tokens.
    """
    ids, offsets = kept[0] or [], kept[1]
    if offsets is None and rows is not None and not any(loss_mask):
        offsets = [0] * (len(loss_mask) + 1)
    if offsets is None or rows is None:
        return None, None
    if len(rows) != len(tokens) or any(row and token not in row for token, row in zip(tokens, rows)):
        raise ValueError(f"output_token_sampling_mask does not have the {len(tokens)} sampled tokens")
    return [*ids, *chain.from_iterable(rows)], [*offsets[:-1], *accumulate(map(len, rows), initial=offsets[-1])]
