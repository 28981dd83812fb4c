"""Make an `EngineCore` of a model directory, draw prompts for it, and run it until every request is finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from slime_embedded.engine.core import CoreOptions, EngineCore
from slime_embedded.engine.sequence import Sequence

from slime_core.models.config import load_model_config
from slime_core.models.hf_io import read_weights


def make_core(directory: Path, *, eos_ids: tuple[int, ...] = (), **options: Any) -> EngineCore:
    return EngineCore(
        load_model_config(directory), read_weights(directory), eos_ids=eos_ids, options=CoreOptions(**options)
    )


def run(core: EngineCore, prompts: list[list[int]], *params: dict[str, Any], **kwargs: Any) -> list[Sequence]:
    chosen = params if len(params) > 1 else params * len(prompts)
    sequences = [core.add_request(p, s, f"r{i}", **kwargs) for i, (p, s) in enumerate(zip(prompts, chosen))]
    for _ in range(10_000):
        if not core.has_work:
            return sequences
        core.step()
    raise AssertionError("the engine did not finish")


def prompts(n: int, seed: int = 0, low: int = 1, high: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (n,), generator=generator).tolist()
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]
