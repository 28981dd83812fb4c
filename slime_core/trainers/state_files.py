"""What both trainers' checkpoints hold beside tensors: JSON files, of counters, the schedule and random states.

The states are torch's, Python's and numpy's global ones.
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
    """Write `value`, indented."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def capture_rng() -> dict[str, Any]:
    """The states as JSON values; generator words are base64."""
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
    """Inverse of `capture_rng`; a CUDA state is restored where there is a GPU."""
    torch.set_rng_state(_decode(state["torch"]))
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = np.frombuffer(base64.b64decode(numpy["keys"]), dtype="<u4")
    np.random.set_state((numpy["algorithm"], keys, numpy["place"], numpy["has_gauss"], numpy["cached"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"]))


def restored_states(saved: int, now: int, rank: int) -> bool:
    """Whether this process takes its stored states up again.

    All do where there are as many as `saved` theirs. With another number those of process 0 go on, since rollouts are
    its work, and the others start over, which process 0 says: training draws nothing at dropout 0.
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
