"""`slime.utils.mask_utils.MultiTurnLossMaskGenerator`: a conversation's ids and which of them the assistant wrote.

Over slime_core's supervised reader. The four `tokenizer_type`s of THUDM/slime are four algorithms there; here one
algorithm asks the chat template, whatever the model, and writes each turn as it is while it is the last; it refuses
turns that are not exactly what the message says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime import _missing

TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen")


class MultiTurnLossMaskGenerator:
    """Loss masks for multi-turn conversations.

    Args:
        tokenizer: HF tokenizer with a chat template.
        tokenizer_type: One of `TYPES`. "distill_qwen" trains the last assistant turn only; the others train all turns.

    Raises:
        ValueError: Another type.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        if tokenizer_type not in TYPES:
            raise ValueError(f"tokenizer_type {tokenizer_type!r}: allowed: {', '.join(TYPES)}")
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type

    def get_loss_mask(
        self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """Ids of the whole conversation and, for each, 1 where the assistant wrote it.

        A turn includes its end token. `step_loss_mask` other than 1 on a message leaves it out.

        Raises:
            slime_core.errors.DataError: There is no chat template, or a turn is not what its message says.
        """
        from slime_commands.sft.demonstrations import conversation_pieces
        from slime_commands.sft.mask_types import DISTILL, apply_type

        from slime_core.data.tokenizer import encode_rendered, render_messages

        if not any(message["role"] == "assistant" for message in messages):
            ids = encode_rendered(self.tokenizer, render_messages(self.tokenizer, messages, tools))
            return ids, [0] * len(ids)
        pieces = conversation_pieces(self.tokenizer, messages, tools)
        if self.tokenizer_type == DISTILL:
            pieces = apply_type(DISTILL, self.tokenizer, messages, pieces, tools)
        ids = [token for piece in pieces for token in piece.ids]
        mask = [int(piece.trained) for piece in pieces for _ in piece.ids]
        return ids, mask

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Per mask, how many entries from the first 1 to the end; 0 without any."""
        return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """The text of each run of ids with mask 1."""
        runs: list[list[int]] = []
        previous = 0
        for token, trained in zip(token_ids, loss_masks, strict=True):
            if trained:
                if not previous:
                    runs.append([])
                runs[-1].append(token)
            previous = trained
        return [str(self.tokenizer.decode(run)) for run in runs]


__all__ = ["MultiTurnLossMaskGenerator"]
__getattr__ = _missing.names(__name__)
