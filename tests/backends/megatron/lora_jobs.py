"""Adapters on any trainer: what the ranks of the tests run, and the same in the test's own process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.backends.megatron import trainer_jobs as jobs

LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8.0}
MICRO_BATCHES = jobs.shares(1)[0][1]


def adapters_of(trainer: Any, directory: Path | None = None) -> dict[str, torch.Tensor]:
    """HF names -> whole adapters, as a checkpoint has them; on ranks but the first what they see of it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if directory is None else directory
        trainer.save(folder)
        stored = load_file(folder / "adapter" / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model.").removesuffix(".weight"): t for name, t in stored.items()}


def three_steps(trainer: Any, directory: Path) -> dict[str, Any]:
    """`trainer_jobs.trained`, and the adapters from a checkpoint in `directory`, which all ranks share."""
    share = jobs.shares(trainer.world_size, getattr(trainer, "micro_batch_multiple", 1))[trainer.rank]
    found = jobs.trained(trainer, share)
    return {**found, "adapters": adapters_of(trainer, directory)}


def compare_adapters(results: list[dict[str, Any]], expected: dict[str, Any], tolerance: float = 2e-4) -> None:
    """Log-probs, metrics, merged weights and adapters are those expected."""
    from tests.backends.megatron.trainer_jobs import compare

    compare(results, expected, tolerance)
    assert results[0]["adapters"].keys() == expected["adapters"].keys()
    for name, tensor in expected["adapters"].items():
        torch.testing.assert_close(results[0]["adapters"][name], tensor, rtol=0, atol=tolerance, msg=name)
        assert tensor.abs().max() > 10 * tolerance, f"{name}: the test sees nothing"


def embedded(model: Path, directory: Path, **overrides: Any) -> dict[str, Any]:
    """The embedded trainer over all samples."""
    from slime_embedded.trainer.trainer import EmbeddedTrainer

    trainer = EmbeddedTrainer(jobs.settings(model, **{**LORA, **overrides}))
    try:
        return three_steps(trainer, directory)
    finally:
        trainer.close()


def megatron(model: str, directory: str, **overrides: Any) -> dict[str, Any]:
    """The Megatron trainer on this rank."""
    from slime_trainer_megatron.trainer import MegatronTrainer

    trainer = MegatronTrainer(jobs.settings(model, **{**LORA, **overrides}))
    try:
        return three_steps(trainer, Path(directory))
    finally:
        trainer.close()


def continued(model: str, directory: str, loads: bool, **overrides: Any) -> dict[str, Any]:
    """`trainer_jobs.continued` with adapters."""
    return jobs.continued(model, directory, loads, **{**LORA, **overrides})
