"""Megatron in one process: its state is global to the process, so a fixture makes it and takes it away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from slime_trainer_megatron.layout import Layout
from slime_trainer_megatron.process_groups import ProcessGroups


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def groups() -> Iterator[ProcessGroups]:
    """The groups of a world of one process."""
    joined = ProcessGroups(Layout(), "cpu")
    yield joined
    joined.close()
    assert not torch.distributed.is_initialized(), "a test left process groups open"
