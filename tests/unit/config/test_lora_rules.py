"""`--lora-...` settings among themselves."""

from __future__ import annotations

import pytest

from slime_core.config import load_settings
from slime_core.errors import ConfigError


def load(*argv: str) -> None:
    load_settings(argv, command="show", env={}, foreign=())


def test_what_fits() -> None:
    load("--lora-rank", "8")
    load("--lora-rank", "8", "--lora-alpha", "16", "--lora-dropout", "0", "--lora-target-modules", "q_proj", "v_proj")
    load("--lora-dropout", "0")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lora-alpha", "8"], r"--lora-alpha 8.0 \(flag\): without --lora-rank N there are no adapters"),
        (["--lora-target-modules", "q_proj"], "--lora-target-modules 'q_proj'"),
        (["--lora-rank", "8", "--lora-dropout", "0.1"], r"--lora-dropout 0.1 \(flag\): .*only 0"),
        (["--lora-rank", "0"], "--lora-rank '0'"),
        (["--lora-rank", "8", "--lora-alpha", "0"], "--lora-alpha '0'"),
    ],
)
def test_what_does_not(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*argv)
