"""Megatron in one process: its state is global to the process, so a fixture makes it and takes it away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_trainer_megatron.layout import Layout
from slime_trainer_megatron.process_groups import ProcessGroups
from slime_trainer_megatron.trainer import MegatronTrainer

from tests.backends.megatron import trainer_jobs


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


@pytest.fixture
def build() -> Iterator[Callable[..., MegatronTrainer]]:
    """Build trainers of a model's directory, which are closed after the test."""
    made: list[MegatronTrainer] = []

    def one(model: Path, role: Any = "actor", **settings: Any) -> MegatronTrainer:
        made.append(MegatronTrainer(trainer_jobs.settings(model, **settings), role=role))
        return made[-1]

    yield one
    for trainer in made:
        trainer.close()
    assert not torch.distributed.is_initialized()
