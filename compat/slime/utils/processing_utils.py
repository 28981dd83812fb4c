"""`slime.utils.processing_utils`: load tokenizers and processors, and encode images for the user's own vision engine.

The loaders are those of transformers, with its downloads and its `trust_remote_code`. slime_core loads the run's
tokenizer (`GenerateState(args).tokenizer`) without either.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from slime import _missing


def load_tokenizer(name_or_path: str, chat_template_path: str | None = None, **kwargs: Any) -> Any:
    """Call `transformers.AutoTokenizer.from_pretrained`; replace the chat template if a template file is given."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    if chat_template_path:
        tokenizer.chat_template = Path(chat_template_path).read_text(encoding="utf-8")
    return tokenizer


def load_processor(name_or_path: str, **kwargs: Any) -> Any:
    """Call `transformers.AutoProcessor.from_pretrained`; return None for a model that has only a tokenizer."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)  # type: ignore[no-untyped-call]
    except (OSError, ValueError):
        return None  # as in THUDM/slime: text models have no processor files
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a processor's arguments other than the text: `multimodal_inputs`, and options for the return types.

    `processor(text=prompt, **build_processor_kwargs({"images": [...]}))` returns `input_ids` as a list, and the arrays
    of each kind of input as torch tensors.
    """
    given = dict(multimodal_inputs or {})
    kinds = {
        name: {**(given.get(name) or {}), "return_tensors": "pt"}
        for name in ("audio_kwargs", "images_kwargs", "videos_kwargs")
    }
    return {**given, "return_tensors": None, **kinds}


def encode_image_for_rollout_engine(image: Any) -> str:
    """Encode a PIL image as a `data:` URL for SGLang (PNG)."""
    buffer = io.BytesIO()
    (image if image.mode == "RGB" else image.convert("RGB")).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


__all__ = ["build_processor_kwargs", "encode_image_for_rollout_engine", "load_processor", "load_tokenizer"]
__getattr__ = _missing.names(__name__)
