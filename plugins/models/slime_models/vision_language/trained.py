"""A vision-language model of transformers for the embedded trainer: packed tokens and images in, hidden states out.

`EmbeddedTrainer` uses it in place of a `Decoder` (`ModelConfig.build`). The architecture is transformers' own, so every
part, including the vision tower, matches the published weights. Samples are processed one at a time, since their images
differ in size; a micro-batch of several samples saves no time and only shares the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from slime_embedded.hf.files import places
from slime_embedded.hf.model import load_transformers
from slime_embedded.models.decoder import Decoder
from slime_embedded.models.routing import Routing
from torch import nn

from slime_core.errors import TrainError
from slime_core.models.config import ModelConfig
from slime_core.multimodal import TrainInputs

_PER_TOKEN = ("mm_token_type_ids", "token_type_ids")
"""Inputs with the type of every prompt token, [1, prompt]; response tokens are text, type 0."""


@dataclass(frozen=True)
class _Loaded:
    model: Any


class VisionLanguageModel(Decoder):
    """A `transformers` image-text-to-text model in the place of a `Decoder`; parameters have transformers' names.

    Published files and engines use other names, which are in `places`.

    Args:
        config: Configuration of a family with `images`.
        loaded: The model of transformers.
    """

    def __init__(self, config: ModelConfig, *, loaded: Any) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.recompute = False
        for name, child in loaded.named_children():
            self.add_module(name, child)
        self._head = _Loaded(loaded.get_output_embeddings())  # not a second registration of the module
        self.places = places(loaded, [name for name, _ in self.named_parameters()])

    @classmethod
    def from_directory(
        cls, config: ModelConfig, directory: str, device: torch.device | str = "cpu"
    ) -> VisionLanguageModel:
        """Load the model of an HF-layout directory in float32. Raises CheckpointError if the tensors do not match."""
        return cls(config, loaded=load_transformers("AutoModelForImageTextToText", directory, device))

    @property
    def head_weight(self) -> torch.Tensor:
        """Weight of the output layer, [vocab, hidden]."""
        weight: torch.Tensor = self._head.model.weight
        return weight

    def hidden(
        self,
        token_ids: torch.Tensor,
        lengths: Sequence[int],
        *,
        rows: np.ndarray | None = None,
        same: np.ndarray | None = None,
        routing: Routing | None = None,
        images: Sequence[TrainInputs | None] | None = None,
    ) -> torch.Tensor:
        """Return hidden states like `Decoder.hidden`; `images` has the image inputs of each sequence.

        Raises:
            TrainError: The model refuses a sample's images.
        """
        assert routing is None, "vision-language models have no routing replay"
        assert same is None, "samples go through one at a time"
        parts = []
        for ids, inputs in zip(torch.split(token_ids, list(lengths)), images or [None] * len(lengths), strict=True):
            try:
                found = self.model(input_ids=ids[None], use_cache=False, **_tensors(inputs, ids))
            except (ValueError, RuntimeError, TypeError, KeyError) as error:
                raise TrainError(f"the model refuses a sample of {len(ids)} tokens with {inputs}: {error}") from error
            parts.append(found.last_hidden_state[0])
        hidden = torch.cat(parts)
        return hidden if rows is None else hidden[torch.from_numpy(rows).to(hidden.device)]


def _tensors(inputs: TrainInputs | None, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, array in (inputs or {}).items():
        tensor = torch.tensor(np.asarray(array), device=ids.device)
        if name in _PER_TOKEN:
            padded = tensor.new_zeros(1, len(ids))
            padded[:, : tensor.shape[1]] = tensor
            tensor = padded
        found[name] = tensor
    return found
