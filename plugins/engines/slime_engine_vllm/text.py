"""Token ids -> the text that SGLang would give for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from slime_core.data.tokenizer import has_tokenizer, load_tokenizer


class Text:
    """Decodes with the tokenizer of a model directory, loaded at the first use; empty text without a tokenizer."""

    def __init__(self, directory: str | None) -> None:
        """Set the model directory."""
        self._directory = Path(directory or "")

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer, or None. Raises ConfigError if transformers cannot load it."""
        return load_tokenizer(self._directory) if has_tokenizer(self._directory) else None

    def decode(self, ids: Sequence[int], params: Mapping[str, Any]) -> str:
        """Return the text without what ended the answer, `params["matched"]`, unless `no_stop_trim` keeps it."""
        if self.tokenizer is None:
            return ""
        matched, kept = params.get("matched"), bool(params.get("no_stop_trim"))
        ids = ids[:-1] if isinstance(matched, int) and not kept and ids and ids[-1] == matched else ids
        text: str = self.tokenizer.decode(
            ids,
            skip_special_tokens=params.get("skip_special_tokens") is not False,
            spaces_between_special_tokens=params.get("spaces_between_special_tokens") is not False,
            clean_up_tokenization_spaces=False,
        )
        if isinstance(matched, str) and (at := text.find(matched)) >= 0:
            return text[: at + len(matched)] if kept else text[:at]
        return text
