"""How large the core may be: ceilings that are only ever lowered (`make size` prints where it stands)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType

import pytest

from tests.architecture.trees import tree
from tests.scripts import load_script

ROOT = Path(__file__).parents[2]
CEILINGS = {"modules": 148, "tokens": 164_864, "public_names": 974, "kinds": 21}
WORDS_CEILING = 70_000
"""Words of Markdown written by hand, in the whole repository."""
DEMO_CEILING = 140
"""Modules of slime_core that a run in one process imports."""
FILES_CEILING = 55
"""Files that a sample passes from the prompt to the loss."""
FRAMES_CEILING = 8
"""Call frames between drawing a group and the engine's `generate`."""
NOT_OF_THE_DEMO = (
    "slime_weight_transport_delta",
    "slime_core.rollout.producer",
    "slime_commands.models",
    "slime_embedded.trainer.lora",
    "slime_core.tools",
)


@pytest.fixture(scope="module")
def size() -> ModuleType:
    return load_script("scripts/size.py")


def test_the_core_does_not_grow(size: ModuleType) -> None:
    found = dataclasses.asdict(size.measure(ROOT, tree))
    assert {name: found[name] for name, ceiling in CEILINGS.items() if found[name] > ceiling} == {}


def test_the_pages_do_not_grow(size: ModuleType) -> None:
    assert size.words_of_markdown(ROOT) <= WORDS_CEILING


@pytest.mark.slow
def test_a_run_in_one_process_imports_what_it_uses(size: ModuleType) -> None:
    demo = size.demo()
    for name in NOT_OF_THE_DEMO:
        assert not [module for module in demo.modules if f"{module}.".startswith(f"{name}.")], name
    assert sum(module.split(".")[0] == "slime_core" for module in demo.modules) <= DEMO_CEILING
    assert len(demo.files) <= FILES_CEILING, demo.files
    assert 0 < len(demo.frames) <= FRAMES_CEILING, demo.frames
