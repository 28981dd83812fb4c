"""The device that a thread beside the main one uses: CUDA's is a thread's own, and another one would begin with 0."""

from __future__ import annotations

import sys


def current_device() -> int | None:
    """CUDA's device in this thread, if a trainer uses one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())


def use_device(device: int | None) -> None:
    """Have this thread use it, too."""
    if device is not None:
        sys.modules["torch"].cuda.set_device(device)
