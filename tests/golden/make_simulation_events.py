"""Writes `simulation_events.json`: per mode and seed a hash of a simulated run's ledger and of what it trained on.

    python tests/golden/make_simulation_events.py

`make oracle` compares two commits; this compares with what was there before the core was taken apart.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ORACLE = HERE.parents[1] / "scripts" / "oracle.py"


def load_oracle() -> Any:
    """`scripts/oracle.py` as a module."""
    spec = importlib.util.spec_from_file_location("oracle", ORACLE)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["oracle"] = module = importlib.util.module_from_spec(spec)  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def digests(seeds: int, mode: str) -> list[str]:
    """Of the first seeds of a mode."""
    oracle = load_oracle()
    simulation = oracle.find_simulation(ORACLE.parents[1])
    runs = (oracle.simulated(simulation, seed, mode) for seed in range(seeds))
    return [hashlib.blake2b(run.encode(), digest_size=6).hexdigest() for run in runs]


def main() -> None:
    """All modes."""
    oracle = load_oracle()
    lines = [f'"{mode}": {json.dumps(digests(oracle.SEEDS, mode))}' for mode in oracle.MODES]
    (HERE / "simulation_events.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
