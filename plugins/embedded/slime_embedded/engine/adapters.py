"""Several adapters in one engine: a model with each adapter merged, of which a request names one.

`EngineCore` builds both classes with `--lora-adapters`, in place of the one model's weights and runner. Each adapter
has its own weights, merged by the trainer, its own arenas and its own prefixes. A step runs every model that has
sequences. The name "" is the shared adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from slime_core.errors import ConfigError, WeightSyncError
from slime_core.models.hf_io import read_json, read_weights
from slime_embedded.engine.kv_cache import Arena
from slime_embedded.engine.model_runner import DecodeBatch, ModelRunner
from slime_embedded.engine.sequence import Sequence
from slime_embedded.engine.weights import FusedWeights
from slime_embedded.models.lora import CONFIG, WEIGHTS, merged, module_of
from slime_embedded.models.lora_linear import ADAPTERS, DOWN, UP

if TYPE_CHECKING:
    from slime_embedded.engine.invariant_runner import InvariantRunner

_Pairs = list[tuple[str, torch.Tensor]]


class AdapterWeights:
    """The fused weights of each adapter's model; `FusedWeights`' methods."""

    def __init__(self, parts: Mapping[str, FusedWeights]) -> None:
        self.parts = parts
        """Weights by the adapter's name, "" first."""
        self._own: dict[str, list[str]] = {}
        """Names of the weights that were given for an adapter alone."""

    def update(self, weights: Iterable[tuple[str, torch.Tensor]], origin: str) -> None:
        """Copy a complete set of HF tensors in, or change nothing: `adapters.NAME.<HF name>` belongs to one adapter.

        Raises:
            WeightSyncError: The tensors of an adapter are not complete, or its name is unknown.
        """
        given: dict[str, _Pairs] = {name: [] for name in self.parts}
        for full, tensor in weights:
            first, _, rest = full.partition(".")
            name, _, weight = rest.partition(".") if first == ADAPTERS else ("", "", full)
            if name not in given:
                raise WeightSyncError(f"{origin}: {full}: no adapter {name!r} is served; nothing was changed")
            given[name].append((weight, tensor))
        own = {name: {weight for weight, _ in given[name]} for name in given if name}
        for name, names in own.items():
            given[name] += [(weight, tensor) for weight, tensor in given[""] if weight not in names]
        checked = {name: part.complete(given[name], origin) for name, part in self.parts.items()}
        for name, part in self.parts.items():
            part.update(checked[name].items(), origin)
        self._own = {name: sorted(names) for name, names in own.items()}

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return views that together cover every fused tensor."""
        return chain.from_iterable(part.tensors() for part in self.parts.values())

    @property
    def packed_bytes(self) -> int:
        """Size in bytes of the packed copies."""
        return sum(part.packed_bytes for part in self.parts.values())

    def drop_packed(self) -> None:
        """Free the packed copies until the next `update`."""
        for part in self.parts.values():
            part.drop_packed()

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and tensors of the last update, in HF layout."""
        yield from self.parts[""].named()
        for name, own in self._own.items():
            tensors = dict(self.parts[name].named())
            yield from ((f"{ADAPTERS}.{name}.{weight}", tensors[weight]) for weight in own)


class AdapterRunner:
    """The runner of each adapter's model; `ModelRunner`'s methods, which sort sequences by their adapter."""

    def __init__(self, runners: Mapping[str, ModelRunner | InvariantRunner]) -> None:
        self._runners = runners
        shared = runners[""]
        self.dtype, self.kv_dtype, self.device = shared.dtype, shared.kv_dtype, shared.device
        self.logits, self.score_tokens = shared.logits, shared.score_tokens  # no adapter changes the output layer
        self._decoding: list[str] = []

    @property
    def routed(self) -> torch.Tensor | None:
        """Experts of the last decode step, in the order of its sequences; None for a dense model."""
        parts = [routed for name in self._decoding if (routed := self._runners[name].routed) is not None]
        return torch.cat(parts) if parts else None

    def weights_changed(self) -> None:
        """Tell every runner."""
        for runner in self._runners.values():
            runner.weights_changed()

    def tensors(self) -> list[torch.Tensor]:
        """Return the copies of weights that the runners hold."""
        return [tensor for runner in self._runners.values() for tensor in runner.tensors()]

    def prefill(self, sequences: Seq[Sequence], starts: Seq[int]) -> list[torch.Tensor]:
        """See `ModelRunner.prefill`."""
        done: dict[Sequence, torch.Tensor] = {}
        for name, runner in self._runners.items():
            chosen = [(s, start) for s, start in zip(sequences, starts) if s.adapter == name]
            if chosen:
                own = [s for s, _ in chosen]
                done.update(zip(own, runner.prefill(own, [start for _, start in chosen])))
        return [done[sequence] for sequence in sequences]

    def decode_batch(self, arenas: Seq[Arena]) -> DecodeBatch:
        """Return the running sequences as a batch, adapter by adapter."""
        parts = {}
        for name, runner in self._runners.items():
            own = [arena for arena in arenas if arena.sequences and arena.sequences[0].adapter == name]
            if own:
                parts[name] = runner.decode_batch(own)
        self._decoding = list(parts)
        return _Joined(list(parts.values()))


class _Joined(DecodeBatch):
    """The decode batches of several models as one."""

    def __init__(self, parts: list[DecodeBatch]) -> None:
        self._parts = parts
        self.sequences = [sequence for part in parts for sequence in part.sequences]
        self.steps_left = min(part.steps_left for part in parts)

    def run(self) -> torch.Tensor:
        """Return the logits [B, vocab] of the next tokens."""
        return torch.cat([part.run() for part in self._parts])

    def advance(self, tokens: torch.Tensor) -> None:
        """Make `tokens` [B] the inputs of the next step."""
        for part, own in zip(self._parts, torch.split(tokens, [len(part.sequences) for part in self._parts])):
            part.advance(own)
        self.steps_left -= 1


def stored(directory: Path, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the merged weights of a checkpoint's adapters, under the names of `AdapterWeights.update`.

    A base model has no adapters: all of them are then the model itself, as at the start of a training.

    Raises:
        ConfigError: The checkpoint has adapters, but not one of `names`, or their base is gone.
    """
    if not (directory / ADAPTERS).is_dir():
        return
    for name in names:
        folder = directory / ADAPTERS / name
        if not folder.is_dir():
            known = ", ".join(sorted(path.name for path in folder.parent.iterdir()))
            raise ConfigError(f"--lora-adapters {name}: {directory} has no such adapter; it has {known}")
        config = read_json(folder / CONFIG)
        base, scale = Path(config["base_model_name_or_path"]), config["lora_alpha"] / config["r"]
        if not (base / "config.json").is_file():
            raise ConfigError(f"{folder}: its base model {base} is not there; put it there again")
        pairs = {key.removeprefix("base_model.model."): tensor for key, tensor in load_file(folder / WEIGHTS).items()}
        for weight, tensor in read_weights(base):
            down, up = (pairs.get(f"{module_of(weight)}.{part}.weight") for part in (DOWN, UP))
            if down is not None and up is not None:
                yield f"{ADAPTERS}.{name}.{weight}", merged(tensor.float(), down, up, scale)
