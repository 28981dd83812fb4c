"""Weights of models that have the actor's architecture: kept on the host and put into the actor's modules for a pass.

Called by `trainer.py` for reference, teacher and old actor; one model's memory on the accelerator serves all of them.
Weights are copied into the parameters' own storage, never exchanged for other tensors, because Megatron's optimizer and
its data-parallel buffers hold views of it. The optimizer's float32 copies of 16-bit weights are not looked at, so they
are as before once the actor's weights are back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from slime_core.errors import TrainError
from slime_trainer_megatron.weights.parameters import unwrapped

Tensors = dict[str, torch.Tensor]


class WeightSets:
    """Named copies of the weights of one model of this rank.

    Args:
        chunks: The model's chunks, wrapped or bare.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = list(chunks)
        self._live = self._kept = _weights(chunks)
        self._sets: dict[str, Tensors] = {}
        self._away: Tensors = {}

    def __contains__(self, name: str) -> bool:
        return name in self._sets

    def add_changing(self) -> None:
        """The model got more parameters and only they will change: sets that are there get their values of this
        moment too, and later ones hold nothing else."""
        old, self._live = self._live, _weights(self._chunks)
        self._kept = {key: tensor for key, tensor in self._live.items() if key not in old}
        for kept in self._sets.values():
            kept |= {key: _host_like(tensor) for key, tensor in self._kept.items()}
            _copy(self._kept, kept)

    def keep(self, name: str) -> None:
        """Copy the model's weights of this moment into the set `name`, in their own dtype."""
        if self._sets.get(name, {}).keys() != self._kept.keys():
            self._sets[name] = {key: _host_like(tensor) for key, tensor in self._kept.items()}
        _copy(self._kept, self._sets[name])

    def is_model(self, name: str) -> bool:
        """Whether the set is what the model has at this moment, bit for bit, on this rank."""
        return all(torch.equal(self._live[key].to(tensor.device), tensor) for key, tensor in self._sets[name].items())

    @contextmanager
    def swapped_in(self, name: str) -> Iterator[None]:
        """The model has the weights of the set `name` inside, and its own again afterwards, bit for bit.

        Raises:
            TrainError: There is no such set.
        """
        if name not in self._sets:
            raise TrainError(f"this trainer has no {name!r} weights")
        own = {key: self._live[key] for key in self._sets[name]}
        for key, tensor in own.items():
            if key not in self._away:
                self._away[key] = _host_like(tensor)
        away = {key: self._away[key] for key in own}
        _copy(own, away)
        _copy(self._sets[name], self._live)
        try:
            yield
        finally:
            _copy(away, self._live)

    def tensors(self, name: str) -> Tensors:
        """The tensors of a set, by place in the model; for checkpoints, which may write into them."""
        return self._sets[name]


def _weights(chunks: Sequence[Any]) -> Tensors:
    """Parameters and saved buffers (the router's `expert_bias`) of all chunks; chunks number from 0 on this rank."""
    return {
        f"{number}.{name}": tensor
        for number, chunk in enumerate(chunks)
        for name, tensor in unwrapped(chunk).state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
    }


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


@torch.no_grad()
def _copy(source: Tensors, target: Tensors) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor, non_blocking=True)
    if any(t.is_cuda for t in (*source.values(), *target.values())):
        torch.cuda.current_stream().synchronize()
