"""JSON files in both trainers' checkpoints: counters, the schedule and random states.

The random states are the global states of torch, Python and numpy.
"""

from __future__ import annotations

import base64
import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def capture_rng() -> dict[str, Any]:
    """Return the random states as JSON values; the generator words of torch and numpy are base64."""
    version, words, gauss = random.getstate()
    algorithm, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": _encode(torch.get_rng_state()),
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "algorithm": algorithm,
            "keys": base64.b64encode(np.asarray(keys, dtype="<u4").tobytes()).decode("ascii"),
            "place": int(place),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }
    if torch.cuda.is_available():
        state["cuda"] = _encode(torch.cuda.get_rng_state())
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Restore the states of `capture_rng`; a CUDA state is restored if there is a GPU."""
    torch.set_rng_state(_decode(state["torch"]))
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = np.frombuffer(base64.b64decode(numpy["keys"]), dtype="<u4")
    np.random.set_state((numpy["algorithm"], keys, numpy["place"], numpy["has_gauss"], numpy["cached"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"]))


def restored_states(saved: int, now: int, rank: int) -> bool:
    """Return whether this process restores its stored random states.

    Every process does if the number of processes is still `saved`. Otherwise only process 0 does, since rollouts run in
    it, and it warns that the others start with fresh states: training draws no random numbers at dropout 0.
    """
    if saved == now:
        return True
    if rank == 0:
        logger.warning(
            "random states were saved by %d processes and this run has %d: those of process 0 go on, the others are"
            " fresh; training itself draws nothing at dropout 0",
            saved,
            now,
        )
    return rank == 0


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
