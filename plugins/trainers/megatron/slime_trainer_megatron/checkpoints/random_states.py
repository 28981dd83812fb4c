"""The random states of a process of this trainer <-> JSON values: torch's, Python's, numpy's, and Megatron's own.

`checkpoint.py` calls it. Megatron switches between named states of the GPU's generator (for dropout that is alike, or
different, on tensor-parallel ranks). Those that are not in use are none of torch's.
"""

from __future__ import annotations

import base64
from typing import Any

import torch

from slime_core.trainers.state_files import capture_rng, restore_rng

_MEGATRON = "megatron"


def capture() -> dict[str, Any]:
    """The states as JSON values."""
    states = {name: tensor for name, tensor in _tracked().items() if isinstance(tensor, torch.Tensor)}
    encoded = {name: base64.b64encode(tensor.cpu().numpy().tobytes()).decode() for name, tensor in states.items()}
    return {**capture_rng(), _MEGATRON: encoded}


def restore(state: dict[str, Any]) -> None:
    """Inverse of `capture`; states that this process has no name for are left out."""
    restore_rng(state)
    own, stored = _tracked(), state.get(_MEGATRON, {})
    for name in own.keys() & stored.keys():
        if isinstance(own[name], torch.Tensor):
            own[name] = torch.frombuffer(bytearray(base64.b64decode(stored[name])), dtype=torch.uint8)
    if stored:
        _tracker().set_states(own)


def _tracker() -> Any:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def _tracked() -> dict[str, Any]:
    """A copy; of names and states, or, where Megatron records CUDA graphs, of generators, which are left alone."""
    tracker = _tracker()
    return dict(tracker.get_states()) if tracker.is_initialized() else {}
