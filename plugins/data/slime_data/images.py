"""A row's images and its prompt -> chat messages with image parts, token ids with image tokens, and train inputs.

`rows.PromptReader` calls this (entry-point group `slime.data`) if `--multimodal-keys` is set. Images are named by
columns, one for each `<image>` in the text, or stand in the messages as content parts `{"type": "image", "image":
...}`. The ids come from the model's own processor, since the number of an image's tokens depends on its size. They
differ from the tokenizer's ids of the rendered text.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.data.rows import IMAGE, check_kinds
from slime_core.data.tokenizer import spelled, without_advice
from slime_core.errors import ConfigError, DataError
from slime_core.multimodal import TrainInputs, image_bytes, image_ref

PLACEHOLDER = "<image>"
"""Placeholder in a text for the next image of the row, as in THUDM/slime."""
_NO_TRAIN_INPUTS = ("input_ids", "attention_mask")


def load_processor(directory: str | Path) -> Any:
    """Load the HF processor of a local directory. Raises ConfigError if it is missing or does not take images."""
    from transformers import AutoProcessor
    from transformers.utils.import_utils import is_torchvision_available

    try:
        load: Any = AutoProcessor.from_pretrained if is_torchvision_available() else _without_videos
        processor = load(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"--hf-checkpoint {directory}: --multimodal-keys needs its processor: {without_advice(error)}"
        ) from error
    if getattr(processor, "image_processor", None) is None:
        raise ConfigError(
            f"--hf-checkpoint {directory}: --multimodal-keys needs a processor that takes images; there is only a"
            f" {type(processor).__name__}"
        )
    return processor


def _without_videos(directory: str, **options: Any) -> Any:
    """Load a processor like `AutoProcessor.from_pretrained`, but without its video part, which needs torchvision."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    hf: Any = transformers  # not typed
    kind: Any = PROCESSOR_MAPPING.get(type(hf.AutoConfig.from_pretrained(directory, **options)), None)
    if isinstance(kind, tuple) or kind is None or "video_processor" not in kind.get_attributes():
        return hf.AutoProcessor.from_pretrained(directory, **options)

    class ImagesOnly(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, value: Any) -> Any:
            return None if value is None else super().check_argument_for_proper_class(name, value)

    images = hf.AutoImageProcessor.from_pretrained(directory, **options)
    tokenizer = hf.AutoTokenizer.from_pretrained(directory, **options)
    return ImagesOnly(image_processor=images, tokenizer=tokenizer, video_processor=None)


class ImagePrompts:
    """Prompts with images of one data set.

    Args:
        processor: HF processor of the model that is trained.
        columns: Kind -> column, `--multimodal-keys`.
        folder: Folder of the data file; relative paths of images start here.

    Raises:
        ConfigError: A kind other than "image".
    """

    def __init__(self, processor: Any, columns: Mapping[str, str], folder: Path) -> None:
        check_kinds(columns)
        self._processor = processor
        self._column = columns.get(IMAGE)
        self._folder = folder
        self.tokenizer = processor.tokenizer
        """The processor's tokenizer."""

    def messages(
        self, prompt: str | Sequence[Mapping[str, Any]], row: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the prompt as messages whose image parts are empty, and the images of these parts, in order.

        Raises:
            DataError: Placeholders and images do not match, or an image cannot be read.
        """
        waiting = self._of_column(row)
        named = len(waiting)
        refs: list[str] = []
        found: Sequence[Mapping[str, Any]] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        )
        messages: list[dict[str, Any]] = [dict(message) for message in found]
        placeholders = 0
        for message in messages:
            parts, count = _parts(message.get("content"))
            placeholders += count
            if parts is None:
                continue
            message["content"] = [self._part(part, waiting, refs) for part in parts]
        if waiting or placeholders > named:
            raise DataError(
                f"{placeholders} {PLACEHOLDER} in the prompt, and {named} images in column {self._column!r}"
                " (--multimodal-keys); there must be one image for each"
            )
        return messages, refs

    def _of_column(self, row: Mapping[str, Any]) -> list[Any]:
        value = row.get(self._column) if self._column else None
        if value is None:
            return []
        return list(value) if isinstance(value, list | tuple) else [value]

    def _part(self, part: Mapping[str, Any], waiting: list[Any], refs: list[str]) -> dict[str, Any]:
        kind = part.get("type")
        if kind == "text":
            return {"type": "text", "text": part.get("text", "")}
        if kind not in ("image", "image_url"):
            raise DataError(f"a content part of type {kind!r}; this version reads text and image")
        image = part.get("image", part.get("image_url"))
        if image is None:
            image = waiting.pop(0) if waiting else None
        if image is None:
            return {"type": "image"}  # `messages` counts them
        try:
            refs.append(image_ref(image, self._folder))
        except ValueError as error:
            raise DataError(f"image {len(refs)}: {error}") from error
        return {"type": "image"}

    def _spelling(self, text: str) -> Any:
        """Return the processor; if the text spells control tokens, return a copy that encodes them as plain text."""
        if len(spelled(self._processor.tokenizer, text)) == 1:
            return self._processor
        spelling = copy.copy(self._processor)
        spelling.tokenizer = _Spelled(self._processor.tokenizer)
        return spelling

    def encode(self, text: str, refs: Sequence[str]) -> tuple[list[int], TrainInputs]:
        """Return the ids of the rendered prompt, image tokens included, and the model's further inputs.

        Raises:
            DataError: An image cannot be read, or the processor refuses text and images.
        """
        try:
            images = [open_image(ref) for ref in refs]
            found = self._spelling(text)(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
            inputs = TrainInputs.of({k: v for k, v in found.items() if k not in _NO_TRAIN_INPUTS})
        except (ValueError, TypeError, IndexError) as error:
            raise DataError(f"the processor refuses the prompt and its {len(refs)} images: {error}") from error
        return [int(token) for token in found["input_ids"][0]], inputs


class _Spelled:
    """A tokenizer that encodes control tokens in messages as text, after the processor has inserted the images."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, texts: Sequence[str], return_tensors: Any = None, **options: Any) -> Any:
        """Return lists, which the processor turns into tensors."""
        found = [self._tokenizer(spelled(self._tokenizer, text), **options) for text in texts]
        return {key: [[n for piece in of_text[key] for n in piece] for of_text in found] for key in found[0]}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _parts(content: Any) -> tuple[list[Mapping[str, Any]] | None, int]:
    """Return the content as parts (None without an image) and the number of images to take from the row's column."""
    if isinstance(content, str):
        pieces = content.split(PLACEHOLDER)
        if len(pieces) == 1:
            return None, 0
        parts: list[Mapping[str, Any]] = []
        for number, piece in enumerate(pieces):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": piece}] if piece else []
        return parts, len(pieces) - 1
    if not isinstance(content, list):
        return None, 0
    found: list[Mapping[str, Any]] = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") == "text" and PLACEHOLDER in str(part.get("text")):
            found += _parts(str(part["text"]))[0] or []
        elif isinstance(part, Mapping):
            found.append({k: v for k, v in part.items() if v is not None})
        else:
            raise DataError(f"a content part is a {type(part).__name__}; expected an object with a 'type'")
    open_places = [p for p in found if p.get("type") == "image" and p.get("image", p.get("image_url")) is None]
    return found, len(open_places)


def open_image(ref: str) -> Any:
    """Return the image as a PIL image in RGB. Raises ValueError if it cannot be read as an image."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(image_bytes(ref))).convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{ref[:200]}: not an image that can be read: {error}") from error
