"""The device of a thread, which CUDA begins at 0 in each, and the memory of a device."""

from __future__ import annotations

import os
import sys
from pathlib import Path


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


def main_memory() -> int:
    """Bytes, of the machine or of the limit of this process's control group."""
    machine, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="utf-8").strip() if limit.is_file() else ""
    return min(machine, int(text)) if text.isdigit() else machine
