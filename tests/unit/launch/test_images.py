"""A run with images starts only where every part of it takes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.load import load_settings
from slime_core.errors import ConfigError
from slime_core.launch.components import resolve_components

BASE = [
    "--hf-checkpoint", "/m", "--prompt-data", "p.jsonl", "--rm-type", "exact", "--num-rollout", "3",
    "--rollout-batch-size", "4", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "16",
    "--multimodal-keys", '{"image": "images"}',
]  # fmt: skip
HTTP = ["--rollout-engine", "http", "--rollout-external-engine-addrs", "127.0.0.1:1"]


def resolved(*argv: str) -> None:
    resolve_components(load_settings([*BASE, *argv], env={}))


def test_engines_that_take_images() -> None:
    with pytest.raises(ConfigError, match=r"--multimodal-keys .*: --rollout-engine .embedded. .* text only .*sglang"):
        resolved("--rollout-engine", "embedded")
    resolved(*HTTP)
    resolved("--rollout-engine", "sglang")


def test_a_trainer_that_takes_none() -> None:
    with pytest.raises(ConfigError, match=r"--train-backend .megatron. .* trains on text only .*embedded"):
        resolved(*HTTP, "--train-backend", "megatron")


def test_generate_functions_say_that_they_pass_images_on(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    body = "async def generate(args, sample, sampling_params, *, context):\n    return sample\n"
    path.write_text(body)
    with pytest.raises(ConfigError, match="does not give images to the engine; use single_turn"):
        resolved(*HTTP, "--custom-generate-function-path", f"{path}:generate")
    path = tmp_path / "yours.py"
    path.write_text(
        f"from slime_core import GenerateTraits, declares\n@declares(GenerateTraits(takes_images=True))\n{body}"
    )
    resolved(*HTTP, "--custom-generate-function-path", f"{path}:generate")
    with pytest.raises(ConfigError, match="does not give images"):
        resolved(*HTTP, "--custom-generate-function-path", "tool_use")
