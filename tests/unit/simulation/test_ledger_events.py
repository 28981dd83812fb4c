"""Simulated runs write the same into their ledgers as before the core was taken apart: `simulation_events.json`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_simulation_events", GOLDEN / "make_simulation_events.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("mode", ["sync", "one-step", "full"])
@pytest.mark.parametrize("seeds", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_seeds_are_as_recorded(make: ModuleType, mode: str, seeds: int) -> None:
    recorded = json.loads((GOLDEN / "simulation_events.json").read_text())[mode][:seeds]
    found = make.digests(seeds, mode)
    differ = [seed for seed, (before, now) in enumerate(zip(recorded, found, strict=True)) if before != now]
    assert not differ, f"seeds {differ} of mode {mode}; `make oracle BASE=... CASES=simulation` shows the first events"
