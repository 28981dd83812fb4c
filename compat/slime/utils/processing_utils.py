"""`slime.utils.processing_utils`: tokenizers, and images for a vision engine of the user's own.

These are transformers' own loaders, with its downloads and its `trust_remote_code`; the run's tokenizer
(`GenerateState(args).tokenizer`) is loaded by slime_core, which does neither.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from slime import _missing


def load_tokenizer(name_or_path: str, chat_template_path: str | None = None, **kwargs: Any) -> Any:
    """`transformers.AutoTokenizer.from_pretrained`, with another chat template if a file of one is named."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    if chat_template_path:
        tokenizer.chat_template = Path(chat_template_path).read_text(encoding="utf-8")
    return tokenizer


def load_processor(name_or_path: str, **kwargs: Any) -> Any:
    """`transformers.AutoProcessor.from_pretrained`; None for a model that has a tokenizer only."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)  # type: ignore[no-untyped-call]
    except (OSError, ValueError):
        return None  # THUDM/slime's answer for text models, which have no processor's files
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a processor is called with besides its text: `multimodal_inputs`, and ids as lists beside tensors.

    `processor(text=prompt, **build_processor_kwargs({"images": [...]}))` answers with a list `input_ids` and arrays of
    each kind of input as torch tensors.
    """
    given = dict(multimodal_inputs or {})
    kinds = {
        name: {**(given.get(name) or {}), "return_tensors": "pt"}
        for name in ("audio_kwargs", "images_kwargs", "videos_kwargs")
    }
    return {**given, "return_tensors": None, **kinds}


def encode_image_for_rollout_engine(image: Any) -> str:
    """A PIL image as the `data:` URL that SGLang takes (PNG)."""
    buffer = io.BytesIO()
    (image if image.mode == "RGB" else image.convert("RGB")).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


__all__ = ["build_processor_kwargs", "encode_image_for_rollout_engine", "load_processor", "load_tokenizer"]
__getattr__ = _missing.names(__name__)
