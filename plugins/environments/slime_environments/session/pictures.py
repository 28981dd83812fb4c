"""Images in observations -> image tokens of the sample, images for engines, and inputs for training.

A `Dialogue` has one `Pictures`. Messages keep empty image parts, so that they can be stored as JSON; the images are
`Sample.multimodal_inputs`, those of the row first. The model's own processor says how many tokens an image has.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_data.images import ImagePrompts, load_processor

from slime_core.errors import DataError, RolloutError
from slime_core.multimodal import IMAGES, TrainInputs, has_images, image_token_of, images_of
from slime_core.protocols import Args
from slime_core.protocols.environment import Observation
from slime_core.sample import Sample
from slime_core.sample.provenance import Source

OF_ROW = "row_images"
"""Key in the sample's metadata of the number of images that came with its row."""
_PER_TOKEN = ("mm_token_type_ids", "token_type_ids")
"""Inputs with the type of every token, [1, tokens]: 1 for an image, 0 for text."""


class Pictures:
    """The images of one sample's conversation."""

    def __init__(self, args: Args, sample: Sample) -> None:
        self._checkpoint, self._sample = str(args.hf_checkpoint), sample
        self._new: list[str] = []
        """Images of the newest observation, until `attach`."""

    def take(self, observation: Observation | None) -> Observation | None:
        """Return the observation with empty image parts.

        Raises:
            DataError: An image cannot be read.
            RolloutError: The model takes no images.
        """
        self._new = []
        if observation is None or isinstance(observation, str) or not has_images(observation):
            return observation
        if image_token_of(self._checkpoint) is None:
            raise RolloutError(
                f"the environment shows an image, and the model of --hf-checkpoint {self._checkpoint} reads text only"
                " (no image_token_id in its config.json); name a vision-language model, with --rollout-engine sglang or"
                " --rollout-engine http"
            )
        messages, self._new = _prompts(self._checkpoint).messages(observation, {})
        return messages

    def encoded_prompt(self, text: str) -> list[int] | None:
        """Return the ids of a rendered prompt with the row's images and the new ones; None without images."""
        refs = [*self._of_row(), *self._new]
        return _prompts(self._checkpoint).encode(text, refs)[0] if refs else None

    def expanded(self, pieces: Sequence[tuple[list[int], Source]]) -> list[tuple[list[int], Source]]:
        """Return the pieces with all tokens of the new images. Raises DataError if a template leaves out an image."""
        if not self._new:
            return list(pieces)
        token, prompts = image_token_of(self._checkpoint), _prompts(self._checkpoint)
        found = sum(ids.count(token) for ids, _ in pieces) if token is not None else 0
        if found != len(self._new):
            raise DataError(f"the chat template writes {found} image tokens for {len(self._new)} images")
        tokens = iter([prompts.encode(_spelled(prompts, token), [ref])[0] for ref in self._new])
        return [([t for id in ids for t in (next(tokens) if id == token else [id])], source) for ids, source in pieces]

    def attach(self, *, begin: bool = False) -> None:
        """Add the new images to the sample, whose tokens hold them; `begin`: in place of all but the row's images."""
        sample = self._sample
        if not self._new and not (begin and OF_ROW in sample.metadata):
            return
        held = self._of_row() if begin else images_of(sample.multimodal_inputs)
        sample.metadata.setdefault(OF_ROW, len(held))
        refs = [*held, *self._new]
        self._new = []
        sample.multimodal_inputs = {**(sample.multimodal_inputs or {}), IMAGES: refs} if refs else None
        sample.multimodal_train_inputs = self._train_inputs(refs) if refs else None

    def _of_row(self) -> list[Any]:
        held = images_of(self._sample.multimodal_inputs)
        return held[: self._sample.metadata.get(OF_ROW, len(held))]

    def _train_inputs(self, refs: Sequence[str]) -> TrainInputs:
        import numpy as np

        token, prompts = image_token_of(self._checkpoint), _prompts(self._checkpoint)
        inputs = prompts.encode(_spelled(prompts, token) * len(refs), refs)[1]
        types = np.array([[int(t == token) for t in self._sample.tokens]])
        return TrainInputs.of({n: types if n in _PER_TOKEN else np.asarray(array) for n, array in inputs.items()})


@functools.lru_cache(maxsize=4)
def _prompts(checkpoint: str) -> ImagePrompts:
    return ImagePrompts(load_processor(checkpoint), {}, Path())


def _spelled(prompts: ImagePrompts, token: int | None) -> str:
    return str(prompts.tokenizer.decode([token]))
