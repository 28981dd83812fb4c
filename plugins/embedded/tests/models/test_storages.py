"""Memory that is given back under the same tensors."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from slime_embedded.models.storages import Storages

RESIDENT = """
from pathlib import Path
import torch
from slime_embedded.models.storages import Storages

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

storages = Storages([torch.ones(64 << 20, dtype=torch.uint8)])
before = resident()
storages.free()
print(before - resident())
"""


@pytest.mark.slow
def test_the_system_has_the_memory_back() -> None:
    """In a process of its own: what else lives in this one, and its allocators, would count too."""
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) > 0.9 * (64 << 20)


@pytest.mark.slow
def test_the_memory_is_given_back_and_views_live_on() -> None:
    size = 64 << 20
    whole = torch.ones(size, dtype=torch.uint8)
    half = whole[: size // 2].view(2, -1)
    storages = Storages([whole, half])
    assert storages.nbytes == size, "one storage, counted once"
    storages.free()
    storages.free()
    assert storages.freed
    assert storages.nbytes == 0
    storages.allocate()
    storages.allocate()
    assert storages.nbytes == size
    whole.fill_(7)
    assert int(half.sum(dtype=torch.int64)) == 7 * size // 2, "still a view of the same memory"


def test_what_numpy_holds_is_kept_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    held, free = torch.ones(10), torch.ones(10)
    array = held.numpy()
    storages = Storages([held, free])
    with caplog.at_level(logging.WARNING, logger="slime_core"):
        for _ in range(2):
            storages.free()
            assert storages.nbytes == 40
            storages.allocate()
    assert [record.getMessage() for record in caplog.records] == [
        "40 bytes are not given back: something holds NumPy arrays of these tensors"
    ]
    assert array.sum() == 10
