"""The contracts of losses (`--loss-type`) and of custom loss functions, on logits that carry a gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from slime_commands.custom_loss import CustomLoss
from slime_embedded.models.logprobs import response_log_probs

from slime_core.estimator import EstimatorBase
from slime_core.learning.loss import LossBase
from slime_core.learning.tensors import Denominators, TrainTensors
from slime_core.protocols import MicroBatchOutput, with_defaults
from slime_core.sample import TrainBatch
from slime_testing_contracts.base import Contract

MASKS = ((1, 1, 0), (1,), (0, 1, 1, 1), (0, 0), (1, 1))
LENGTHS = [len(mask) for mask in MASKS]
VOCABULARY = 7
PROMPT = 2
SPLITS = ([[0, 1, 2, 3, 4]], [[4, 2], [0], [3, 1]], [[0], [1], [2], [3], [4]])


@dataclass
class Bound:
    """The results of one optimizer step."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    gradients: list[torch.Tensor]
    """Gradient of each sample's logits, [prompt + response, vocabulary]."""


def example_batch() -> TrainBatch:
    """Return a batch of five samples: masked tokens at either end, one sample fully masked."""
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(0, VOCABULARY, (PROMPT + n,), generator=generator).tolist() for n in LENGTHS]
    return TrainBatch(
        rollout_id=0, tokens=tokens, response_lengths=list(LENGTHS), loss_masks=[list(mask) for mask in MASKS],
        rewards=[1.0, -1.0, 0.5, 0.0, -0.5], raw_rewards=[1.0, 0.0, 0.75, 0.5, 0.25], truncated=[0] * 5,
        sample_indices=list(range(5)), group_indices=[0, 0, 1, 1, 1], rollout_ids=list(range(5)),
        rollout_mask_sums=[sum(mask) for mask in MASKS],
    )  # fmt: skip


def example_tensors() -> TrainTensors:
    """Return tensors with the columns that a loss may read."""
    generator = torch.Generator().manual_seed(4)

    def column(scale: float, shift: float = 0.0) -> list[torch.Tensor]:
        return [torch.randn(n, generator=generator) * scale + shift for n in LENGTHS]

    return TrainTensors(
        loss_masks=[torch.tensor(mask, dtype=torch.float32) for mask in MASKS], rollout_log_probs=column(0.2, -2),
        old_log_probs=column(0.2, -2), ref_log_probs=column(0.2, -2), values=column(0.5), kl=column(0.1),
        advantages=column(1.0), returns=column(1.0), teacher_log_probs=column(0.2, -2),
    )  # fmt: skip


class LossContract(Contract):
    """The loss is a scalar, a sum over samples for any micro-batches, with a gradient on trained tokens only."""

    kind = "losses"
    default_args: ClassVar[Mapping[str, Any]] = {"custom_loss_function_path": "the component"}

    def build(self) -> Any:
        """Build the loss as the launcher does, with the base class as estimator; override to pass other arguments."""
        settings = self.settings
        return with_defaults(self.resolved.obj, LossBase)(settings, EstimatorBase(settings))

    def step(self, micro_batches: Sequence[Sequence[int]], per_token: bool = False) -> Bound:
        """Return loss, metrics and gradients, summed over micro-batches as in the trainer."""
        loss_object, settings, batch = self.build(), self.settings, example_batch()
        generator = torch.Generator().manual_seed(5)
        logits = [torch.randn(len(row), VOCABULARY, generator=generator).requires_grad_() for row in batch.tokens]
        chosen = [p for positions in micro_batches for p in positions]
        step = Denominators.of(batch, chosen, per_token=per_token)
        step = Denominators(step.num_rollouts, step.num_tokens, per_token, tuple(chosen), lambda tensor: tensor)
        loss_fn = loss_object.bind(batch, example_tensors(), step)
        total, metrics = torch.zeros(()), dict[str, torch.Tensor]()
        for positions in micro_batches:
            loss, found = loss_fn(self._output(settings, loss_object, batch, logits, positions))
            assert isinstance(loss, torch.Tensor), f"a loss is a scalar tensor; found {type(loss).__name__}"
            assert loss.shape == (), f"a loss is a scalar; found shape {tuple(loss.shape)}"
            total = total + loss
            for name, value in found.items():
                assert value.shape == (), f"metric {name!r} is a scalar tensor; found shape {tuple(value.shape)}"
                assert not value.requires_grad, f"metric {name!r} carries a gradient; detach it"
                metrics[name] = metrics.get(name, torch.zeros(())) + value
        wanted = [logits[p] for p in range(len(batch))]
        assert total.requires_grad, "the loss carries no gradient: it must be computed from output.log_probs or .logits"
        gradients = torch.autograd.grad(total, wanted, allow_unused=True)
        filled = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, wanted)]
        return Bound(total.detach(), metrics, filled)

    def _output(
        self, settings: Any, loss: Any, batch: TrainBatch, logits: list[torch.Tensor], positions: Sequence[int]
    ) -> MicroBatchOutput:
        joined = torch.cat([logits[p] for p in positions])
        tokens, lengths = [batch.tokens[p] for p in positions], [batch.response_lengths[p] for p in positions]
        log_probs, entropy = response_log_probs(
            joined, tokens, lengths, settings.rollout_temperature, with_entropy=True
        )
        assert entropy is not None
        return MicroBatchOutput(
            list(positions), torch.cat(log_probs),
            entropy=torch.cat(entropy) if loss.needs_entropy else None,
            logits=joined[None] if loss.needs_logits else None,
        )  # fmt: skip

    @pytest.mark.parametrize("per_token", [False, True])
    def test_loss_metrics_and_gradients_are_finite(self, per_token: bool) -> None:
        """Values are finite with and without `--calculate-per-token-loss`."""
        found = self.step(SPLITS[0], per_token)
        assert torch.isfinite(found.loss), f"the loss is {found.loss.item()}"
        for name, value in found.metrics.items():
            assert torch.isfinite(value), f"metric {name!r} is {value.item()}"
        assert all(torch.isfinite(g).all() for g in found.gradients), "a gradient is not finite"
        assert any(g.any() for g in found.gradients), "the gradient is zero everywhere: nothing would be learned"

    @pytest.mark.parametrize("per_token", [False, True])
    def test_no_split_changes_anything(self, per_token: bool) -> None:
        """Loss, metrics and gradients summed over micro-batches are the same for every split of the samples."""
        whole = self.step(SPLITS[0], per_token)
        for micro_batches in SPLITS[1:]:
            parts = self.step(micro_batches, per_token)
            why = (
                f"with the micro-batches {micro_batches} it differs from one micro-batch; divide by the step's"
                " denominators (denominators.weights), not by what the micro-batch holds"
            )
            _same(parts.loss, whole.loss, f"the loss: {why}")
            assert parts.metrics.keys() == whole.metrics.keys(), "the names of the metrics depend on the micro-batch"
            for name, value in whole.metrics.items():
                _same(parts.metrics[name], value, f"metric {name!r}: {why}")
            for one, other in zip(parts.gradients, whole.gradients):
                _same(one, other, f"the gradient: {why}")

    def test_only_trained_tokens_have_a_gradient(self) -> None:
        """Masked tokens, prompts, and samples of another step have no gradient."""
        gradients = self.step(SPLITS[0]).gradients
        for p, (mask, gradient) in enumerate(zip(MASKS, gradients)):
            rows = gradient.any(dim=-1).tolist()
            predicts = [False] * (PROMPT - 1) + [bool(m) for m in mask] + [False]  # a token is predicted one before
            wrong = [i for i, (found, may) in enumerate(zip(rows, predicts)) if found and not may]
            assert not wrong, f"sample {p} with loss mask {mask}: rows {wrong} of the logits have a gradient"
        elsewhere = self.step([[0, 1]]).gradients[2:]
        assert not any(g.any() for g in elsewhere), "a step over samples 0 and 1 has gradients on other samples"


class CustomLossContract(LossContract):
    """The loss contract for `--loss-type custom_loss --custom-loss-function-path`."""

    kind = "custom_losses"

    def build(self) -> Any:
        """Build the built-in loss around the function."""
        settings = self.settings
        return CustomLoss(settings, EstimatorBase(settings), self.resolved.obj)


def _same(found: torch.Tensor, expected: torch.Tensor, why: str) -> None:
    try:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    except AssertionError as error:
        pytest.fail(f"{why}\n{error}", pytrace=False)
