from __future__ import annotations

from collections.abc import Callable

import pytest

from slime_core.config import Settings, load_settings

BASE = [
    "--hf-checkpoint",
    "/m",
    "--prompt-data",
    "d.jsonl",
    "--rollout-batch-size",
    "4",
    "--n-samples-per-prompt",
    "8",
    "--num-rollout",
    "3",
    "--rm-type",
    "math",
    "--rollout-max-response-len",
    "16",
]

Load = Callable[..., Settings]


@pytest.fixture
def load() -> Load:
    """load("--flag", "value", command=..., env=...) on top of settings that pass."""

    def call(*argv: str, base: bool = True, command: str = "train", env: dict[str, str] | None = None) -> Settings:
        return load_settings([*(BASE if base else []), *argv], command=command, env=env or {})

    return call
