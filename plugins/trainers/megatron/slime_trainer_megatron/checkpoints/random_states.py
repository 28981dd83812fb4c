"""Convert the random states of a trainer process to JSON values and back: torch's, Python's, numpy's, Megatron's.

`checkpoint.py` calls this module. Megatron switches between named states of the GPU's generator (for dropout that is
equal or different on tensor-parallel ranks). torch holds only the state in use; Megatron stores the others.
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from slime_embedded.trainer.state_files import capture_rng, restore_rng

_MEGATRON = "megatron"


def capture() -> dict[str, Any]:
    """Return the states as JSON values."""
    states = {name: tensor for name, tensor in _tracked().items() if isinstance(tensor, torch.Tensor)}
    encoded = {name: base64.b64encode(tensor.cpu().numpy().tobytes()).decode() for name, tensor in states.items()}
    return {**capture_rng(), _MEGATRON: encoded}


def restore(state: dict[str, Any]) -> None:
    """Restore the states of `capture`; states with names unknown to this process are skipped."""
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
    """Return a copy of name -> state; with CUDA graphs, Megatron has generators instead, which are not changed."""
    tracker = _tracker()
    return dict(tracker.get_states()) if tracker.is_initialized() else {}
