"""The value model: a decoder's body with one number per token on top, in the layout of HF's token classification.

Built by the trainer for role "critic". The head is `score.weight` [1, hidden] and `score.bias` [1], as in
`Qwen3ForTokenClassification` with `num_labels` 1, so `AutoModelForTokenClassification` loads what is saved. A fresh
head is zero, not random: every value starts at 0 and the first gradient shapes the head alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from slime_core.models.config import ModelConfig
from slime_embedded.hf.files import WeightFiles
from slime_embedded.models.decoder import Decoder

HEAD = ("score.weight", "score.bias")


class Critic(Decoder):
    """A decoder without an output layer, and a linear head to one value.

    Args:
        config: `critic_config` of the language model's.
        recompute: As for `Decoder`.
    """

    def __init__(self, config: ModelConfig, *, recompute: bool = False) -> None:
        super().__init__(config, recompute=recompute)
        self.score = nn.Linear(config.hidden_size, 1)

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R] float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.float(), self.score.weight, self.score.bias).squeeze(-1)


def critic_config(config: ModelConfig) -> ModelConfig:
    """The configuration of the critic over the same body; calling it on its own result changes nothing."""
    # Tied means to `Decoder` that the model has no output layer of its own.
    return replace(config, tie_word_embeddings=True, hf=critic_hf(config.hf))


def critic_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` of the critic over a language model's body."""
    found = dict(hf)
    if names := found.get("architectures"):
        found["architectures"] = [str(name).replace("ForCausalLM", "ForTokenClassification") for name in names]
    return found | {"id2label": {"0": "value"}, "label2id": {"value": 0}}


def with_head(
    weights: Iterable[tuple[str, torch.Tensor]], config: ModelConfig, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights with a head of zeros where they hold none for one value (that of a reward model, say, is dropped)."""
    shapes = dict(zip(HEAD, ((1, config.hidden_size), (1,))))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if name in shapes:
            found[name] = tensor
        else:
            yield name, tensor
    fits = all(name in found and tuple(found[name].shape) == shape for name, shape in shapes.items())
    for name, shape in shapes.items():
        yield name, found[name] if fits else torch.zeros(shape, device=device)


def new_head(files: WeightFiles, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return a head of zeros, unless the files have a head for one value."""
    shapes = dict(zip(HEAD, ((1, config.hidden_size), (1,))))
    if all(files.shapes.get(name) == shape for name, shape in shapes.items()):
        return {}
    return {name: torch.zeros(shape) for name, shape in shapes.items()}
