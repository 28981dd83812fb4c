"""A vision-language model of transformers as the embedded trainer trains it: packed tokens and images in, hidden states
out.

`EmbeddedTrainer` has it in place of a `Decoder` (`ModelConfig.build`). The architecture is transformers' own, so that
every part of it, the vision tower included, is what the published weights were made for. Samples go through one at a
time, since their images differ in size; a micro-batch of several saves no time, only its loss is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from slime_embedded.models.decoder import Decoder
from slime_embedded.models.routing import Routing
from torch import nn

from slime_core.errors import CheckpointError, ConfigError, TrainError
from slime_core.models.config import ModelConfig
from slime_core.multimodal import TrainInputs

_PER_TOKEN = ("mm_token_type_ids", "token_type_ids")
"""Inputs that say of every prompt token what it is, [1, prompt]; response tokens are text, which is 0."""


@dataclass(frozen=True)
class _Loaded:
    model: Any


class VisionLanguageModel(Decoder):
    """A `transformers` image-text-to-text model in the place of a `Decoder`; parameters have transformers' names.

    Those are not the names in published files, which engines know: `published` has them.

    Args:
        config: Of a family with `images`.
        loaded: The model of transformers.
    """

    def __init__(self, config: ModelConfig, *, loaded: Any) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.recompute = False
        for name, child in loaded.named_children():
            self.add_module(name, child)
        self._head = _Loaded(loaded.get_output_embeddings())  # not a second registration of the module
        self.published = _published(loaded, [name for name, _ in self.named_parameters()])
        """Name of a parameter -> its name in files."""

    @classmethod
    def from_directory(
        cls, config: ModelConfig, directory: str, device: torch.device | str = "cpu"
    ) -> VisionLanguageModel:
        """The model of an HF-layout directory, float32. Raises CheckpointError unless its tensors are the model's."""
        from transformers import AutoModelForImageTextToText

        load: Any = AutoModelForImageTextToText.from_pretrained
        try:
            own = {"local_files_only": True, "trust_remote_code": False}
            loaded, info = load(directory, dtype=torch.float32, output_loading_info=True, **own)
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise ConfigError(f"{directory}: transformers cannot load its model: {error}") from error
        problems = [f"missing {name}" for name in info["missing_keys"]]
        problems += [f"unknown {name}" for name in info["unexpected_keys"]]
        if problems:
            raise CheckpointError(f"{directory}: the tensors do not fit its config.json: {', '.join(problems[:20])}")
        return cls(config, loaded=loaded.to(device).eval())

    @property
    def head_weight(self) -> torch.Tensor:
        """[vocab, hidden] of the output layer."""
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
        """As `Decoder.hidden`, with what each of the sequences takes besides its tokens.

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


def _published(loaded: Any, names: Sequence[str]) -> dict[str, str]:
    """As transformers writes them, which renames what it has renamed when it loaded. Raises ConfigError."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, str] = {}
    for name in names:
        written = revert_weight_conversion(loaded, {name: loaded.get_parameter(name).detach()})
        if len(written) != 1:
            raise ConfigError(f"{type(loaded).__name__}: {name} is not one tensor in the files of such models")
        found[name] = next(iter(written))
    return found


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
