"""A commit of a run -> the model as its trainer has it: float32 weights, adapters apart, and its logits.

`written.py` compares these logits with those of the files that it has written, read by transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from slime_embedded.hf.config import model_config
from slime_embedded.hf.files import in_files
from slime_embedded.hf.model import TransformersModel
from slime_embedded.models.decoder import Decoder
from slime_embedded.models.lora import CONFIG, FOLDER, LoraSettings, read_adapter
from slime_embedded.models.lora_linear import ADAPTERS, adapter_weights, add_adapters, merged_weights
from slime_embedded.trainer.state import load_model

from slime_core.checkpoint.sources import source_in
from slime_core.checkpoint.store import find, read_state
from slime_core.errors import CheckpointError, ConfigError
from slime_core.models.config import ModelConfig
from slime_core.models.hf_io import read_json, read_weights
from slime_runs.index import Filter
from slime_runs.run import Run

_SEQUENCES, _LENGTH, _STORED = 4, 48, 256


class Commit:
    """The model of a commit."""

    def __init__(self, run: Run, step: int | None = None, adapter: str | None = None) -> None:
        """Open the newest commit, or the one after rollout `step`, with the shared adapter or the one named.

        Raises:
            CheckpointError: There is no such commit, or its model has Megatron's format.
            ConfigError: The model is of a family that the embedded trainer does not read, or there is no such adapter.
        """
        found = find(run.checkpoints, step)
        source = None if found is None else source_in(found)
        if found is None or source is None:
            raise CheckpointError(f"{run.checkpoints}: no commit there to take the model of")
        if not source.has_hf:
            raise CheckpointError(f"{found}: is {source}; type slime convert megatron-to-hf --load {found} --save DIR")
        self.run, self.path = run, found
        self.rollout_id = int(read_state(found)["rollout_id"])
        self.settings: dict[str, Any] = read_state(found)["settings"]
        self.config: ModelConfig = model_config(found, self.settings.get("model_impl", "auto"))
        if self.config.images:
            raise ConfigError(f"{found}: a {self.config.model_type} model takes images; copy the commit instead")
        self.name = adapter
        """Name of `--lora-adapters`; None: the shared adapter, or the whole model."""
        if adapter is not None and not (found / ADAPTERS / adapter).is_dir():
            known = ", ".join(self.settings.get("lora_adapters") or ()) or "none"
            raise ConfigError(f"--adapter {adapter}: {found} has no such adapter; --lora-adapters of the run: {known}")

    @property
    def adapter(self) -> Path | None:
        """Directory of the adapters; None if the run trained all weights."""
        folder = self.path / FOLDER if self.name is None else self.path / ADAPTERS / self.name
        return folder if folder.is_dir() else None

    @property
    def base(self) -> Path:
        """Directory of the weights that the adapters belong to. Raises CheckpointError if it is gone."""
        assert self.adapter is not None
        base = Path(str(read_json(self.adapter / CONFIG)["base_model_name_or_path"]))
        if not (base / "config.json").is_file():
            raise CheckpointError(f"{self.adapter}: its base model {base} is not there; put it there again")
        return base

    @cached_property
    def decoder(self) -> Decoder:
        """The trainer's model, float32: the weights that the optimizer holds, with the adapters beside them."""
        place = self.path if self.adapter is None else self.base
        if self.config.build is None:
            decoder = Decoder.from_weights(self.config, read_weights(place), origin=str(place))
        else:
            decoder = TransformersModel.from_directory(self.config, str(place))
        if self.adapter is None:
            weights = ((name, p.data) for name, p in decoder.named_parameters())
            load_model(self.path, dict(in_files(weights, decoder.places)))
            return decoder.requires_grad_(False)
        lora = LoraSettings.from_args(SimpleNamespace(**_lora(self.settings)))  # type: ignore[arg-type]
        assert lora is not None
        add_adapters(decoder, lora, 0)
        read_adapter(self.adapter, lora, adapter_weights(decoder))
        return decoder.requires_grad_(False)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names of Hugging Face's layout and float32 tensors, adapters merged, without a tied output layer."""
        found = self.decoder.named_parameters() if self.adapter is None else merged_weights(self.decoder)
        return in_files(((name, tensor.detach()) for name, tensor in found), self.decoder.places)

    @cached_property
    def token_ids(self) -> list[list[int]]:
        """Sequences to compare on: some of the run's newest samples, and random tokens of the whole vocabulary."""
        longest = min(_LENGTH, self.config.max_position_embeddings)
        generator = torch.Generator().manual_seed(0)
        shape = (_SEQUENCES, longest)
        random = torch.randint(self.config.vocab_size, shape, generator=generator).tolist()
        kept = self.run.samples(Filter(), limit=_SEQUENCES)
        stored = [list(sample.row.get("tokens") or ())[:_STORED] for sample in kept]
        return [row for row in (*stored, *random) if row]

    @cached_property
    def logits(self) -> list[torch.Tensor]:
        """[tokens, vocabulary] float32 logits of the trainer's model for each sequence."""
        with torch.no_grad():
            return [self.decoder(torch.tensor(row), [len(row)]) for row in self.token_ids]


def _lora(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in ("lora_rank", "lora_alpha", "lora_target_modules")}


def logits_of(model: Any, token_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the float32 logits of a transformers model, one sequence at a time."""
    with torch.no_grad():
        return [model(torch.tensor([list(row)])).logits[0].float() for row in token_ids]
