"""What the ranks of the trainer's tests run, and the same on the embedded trainer in the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_core.config import Args
from slime_core.protocols import MicroBatchOutput, StepResult
from slime_core.sample import TrainBatch

LENGTHS = ((5, 9), (4, 1), (7, 12), (3, 6), (6, 3), (8, 10), (3, 4), (9, 7))
"""(prompt, response) tokens of each sample."""
VOCABULARY = 61
STEPS = 3


def settings(model: str | Path, **overrides: Any) -> Args:
    """Of a run that learns fast enough for differences to show."""
    basic = {
        "hf_checkpoint": str(model), "device": "cpu", "dtype": "float32", "lr": 1e-2, "lr_decay_style": "linear",
        "lr_decay_iters": 10, "lr_warmup_iters": 2, "lr_warmup_init": 2e-3, "weight_decay": 0.1, "clip_grad": 1.0,
        "adam_beta2": 0.95,
        "data_pad_size_multiplier": 1, "rollout_temperature": 0.8, "distributed_timeout_minutes": 1, "seed": 1,
    }  # fmt: skip
    return Args(**{**basic, **overrides})


def batch(part: range = range(len(LENGTHS))) -> TrainBatch:
    """Samples of random tokens, of which some are masked."""
    generator = torch.Generator().manual_seed(3)
    tokens, masks = [], []
    for prompt, response in LENGTHS:
        tokens.append(torch.randint(0, VOCABULARY, (prompt + response,), generator=generator).tolist())
        masks.append((torch.rand(response, generator=generator) > 0.2).int().tolist())
    count = len(LENGTHS)
    whole = TrainBatch(
        rollout_id=0, tokens=tokens, response_lengths=[r for _, r in LENGTHS], loss_masks=masks,
        rewards=[float(i % 3) - 1.0 for i in range(count)], raw_rewards=[0.0] * count, truncated=[0] * count,
        sample_indices=list(range(count)), group_indices=[i // 2 for i in range(count)],
        rollout_ids=list(range(count)), rollout_mask_sums=[sum(mask) for mask in masks],
    )  # fmt: skip
    return whole.select(part)


TOKENS, WIDTH, TEMPERATURE = 11, 10, 0.7
"""A vocabulary over two ranks of so many columns."""


def shares(world_size: int, multiple: int = 1) -> list[tuple[range, list[list[int]]]]:
    """Each data-parallel rank's samples, and its micro-batches of uneven sizes."""
    each = len(LENGTHS) // world_size
    cut = max(each // 4, 1)
    micro_batches = [list(range(cut)), list(range(cut, each))]
    assert len(micro_batches) % multiple == 0
    return [(range(rank * each, (rank + 1) * each), micro_batches) for rank in range(world_size)]


def clipped_loss(data: TrainBatch, old: list[torch.Tensor], ref: list[torch.Tensor]) -> Callable[..., Any]:
    """Of PPO's form, with an entropy bonus and a KL term; a mean over samples of means over their tokens."""

    def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        lengths = [data.response_lengths[p] for p in output.positions]
        total, ratios = output.log_probs.new_zeros(()), output.log_probs.new_zeros(())
        assert output.entropy is not None
        parts = zip(torch.split(output.log_probs, lengths), torch.split(output.entropy, lengths), output.positions)
        for log_probs, entropy, p in parts:
            mask = torch.tensor(data.loss_masks[p], dtype=torch.float32)
            ratio = (log_probs - old[p]).exp()
            surrogate = torch.minimum(ratio * data.rewards[p], ratio.clamp(0.8, 1.28) * data.rewards[p])
            apart = ref[p] - log_probs
            per_token = -surrogate + 0.05 * (apart.exp() - apart - 1) - 0.01 * entropy
            total = total + (per_token * mask).sum() / mask.sum().clamp(min=1) / len(LENGTHS)
            ratios = ratios + (ratio * mask).sum().detach()
        return total, {"loss": total.detach(), "ratio": ratios}

    return loss_fn


def trained(trainer: Any, share: tuple[range, list[list[int]]]) -> dict[str, Any]:
    """Three steps: metrics of each, log-probs and entropies before and after, and the weights on torch's rank 0."""
    part, micro_batches = share
    data = batch(part)
    before, entropy = trainer.log_probs_and_entropy(data, micro_batches)
    old = [(t + 0.1 * torch.sin(torch.arange(len(t)))).float() for t in before]
    loss_fn = clipped_loss(data, old, before)
    steps: list[StepResult] = []
    for _ in range(STEPS):
        steps.append(trainer.train_step(data, micro_batches, loss_fn, with_entropy=True))
    return {
        "rank": trainer.rank,
        "multiple": getattr(trainer, "micro_batch_multiple", 1),
        "metrics": [step.metrics for step in steps],
        "log_probs": before,
        "entropy": entropy,
        "step_log_probs": [step.log_probs for step in steps],
        "after": trainer.log_probs(data, micro_batches),
        "weights": {name: tensor.detach().clone().cpu() for name, tensor in trainer.named_weights()},
    }


def embedded(model: str | Path, **overrides: Any) -> dict[str, Any]:
    """The embedded trainer over all samples in one process."""
    from slime_embedded.trainer.trainer import EmbeddedTrainer

    trainer = EmbeddedTrainer(settings(model, **overrides))
    try:
        return trained(trainer, shares(1)[0])
    finally:
        trainer.close()


def megatron(model: str, uneven: bool = False, **overrides: Any) -> dict[str, Any]:
    """The Megatron trainer on this rank, over its data-parallel rank's share."""
    from slime_trainer_megatron.trainer import MegatronTrainer

    trainer = MegatronTrainer(settings(model, **overrides))
    try:
        part, micro_batches = shares(trainer.world_size, trainer.micro_batch_multiple)[trainer.rank]
        if uneven and trainer.rank == 1:
            micro_batches = [[position] for positions in micro_batches for position in positions]
        return trained(trainer, (part, micro_batches))
    finally:
        trainer.close()


def compare(results: list[dict[str, Any]], expected: dict[str, Any], tolerance: float = 2e-4) -> None:
    """Every rank's answers are the embedded trainer's for its share, and the weights are its weights."""
    data_size = max(result["rank"] for result in results) + 1
    for result in results:
        part, _ = shares(data_size)[result["rank"]]
        for step, wanted in zip(result["metrics"], expected["metrics"], strict=True):
            assert step == pytest.approx(wanted, rel=tolerance, abs=2e-6)
        for name in ("log_probs", "entropy", "after"):
            for found, position in zip(result[name], part, strict=True):
                torch.testing.assert_close(found, expected[name][position], rtol=0, atol=tolerance)
        for found, wanted in zip(result["step_log_probs"], expected["step_log_probs"], strict=True):
            assert set(found) == set(range(len(part)))
            for place, position in enumerate(part):
                torch.testing.assert_close(found[place], wanted[position], rtol=0, atol=tolerance)
    assert results[0]["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        gap = (results[0]["weights"][name] - tensor).abs().max().item()
        assert gap < tolerance, f"{name}: weights are up to {gap:.2g} apart"


def continued(model: str, directory: str, loads: bool, **overrides: Any) -> dict[str, Any]:
    """The step after a save, or the same step after loading it: its metrics, the weights, the reference's log-probs."""
    from slime_trainer_megatron.trainer import MegatronTrainer

    trainer = MegatronTrainer(settings(model, use_kl_loss=True, **overrides))
    try:
        part, micro_batches = shares(trainer.world_size)[trainer.rank]
        data = batch(part)
        zeros = [torch.full((n,), -4.0) for n in data.response_lengths]
        loss_fn = clipped_loss(data, zeros, zeros)

        def step() -> dict[str, float]:
            return trainer.train_step(data, micro_batches, loss_fn, with_entropy=True).metrics

        if loads:
            trainer.load(Path(directory))
        else:
            step()
            trainer.update_reference()
            step()
            trainer.save(Path(directory))
        return {
            "metrics": step(),
            "weights": {name: tensor.detach().clone() for name, tensor in trainer.named_weights()},
            "ref": trainer.log_probs(data, micro_batches, role="ref"),
        }
    finally:
        trainer.close()


def vocabulary_example() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of both ranks and targets."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 2 * WIDTH, generator=generator, dtype=torch.float64) * 3
    return logits, torch.randint(0, TOKENS, (8,), generator=generator)


def vocabulary_loss(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """Weighs the rows differently."""
    weights = torch.linspace(-1, 2, len(log_probs), dtype=torch.float64)
    return (log_probs * weights + entropy * weights.flip(0)).sum()


def split_vocabulary(chunk_size: int) -> dict[str, torch.Tensor]:
    """On one of two ranks."""
    from slime_trainer_megatron.layout import Layout
    from slime_trainer_megatron.process_groups import ProcessGroups
    from slime_trainer_megatron.step.vocab_parallel import VocabularyPart, vocab_parallel_log_probs

    groups = ProcessGroups(Layout(tensor=2), "cpu", 1)
    logits, targets = vocabulary_example()
    leaf = logits.chunk(2, dim=1)[groups.tensor_rank].clone().requires_grad_()
    part = VocabularyPart.of_rank(groups.tensor_rank, WIDTH, TOKENS, groups.tensor_group)
    log_probs, entropy = vocab_parallel_log_probs(
        leaf * 1, targets, part, temperature=TEMPERATURE, chunk_size=chunk_size, with_entropy=True, overwrite=True
    )
    assert entropy is not None
    vocabulary_loss(log_probs, entropy).backward()
    assert leaf.grad is not None
    groups.close()
    return {"log_probs": log_probs.detach(), "entropy": entropy.detach(), "grad": leaf.grad}


def gathered_places() -> tuple[torch.Tensor, torch.Tensor]:
    """Two entries here and three there -> five in order, and the gradient of their cubes on this rank."""
    from slime_trainer_megatron.layout import Layout
    from slime_trainer_megatron.process_groups import ProcessGroups
    from slime_trainer_megatron.step.heads import gather_places

    groups = ProcessGroups(Layout(context=2), "cpu", 1)
    places = torch.tensor([0, 3] if groups.context_rank == 0 else [1, 4, 2])
    leaf = places.float().requires_grad_()
    whole = gather_places(leaf, places, 5, groups.context_group)
    whole.pow(3).sum().backward()
    assert leaf.grad is not None
    groups.close()
    return whole.detach(), leaf.grad
