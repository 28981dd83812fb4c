"""The contracts of components that change the policy loss: off-policy corrections and loss reducers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch

from slime_core.learning.corrector import Corrected, CorrectionInputs, CorrectionOutputs, Corrector
from slime_core.learning.tensors import Denominators, TrainTensors
from slime_core.plugins.signatures import construct, declared
from slime_core.protocols import LossInputs
from slime_core.sample import TrainBatch
from slime_testing_contracts.base import Contract, only_where

MASKS = ((1, 1, 0), (1,), (0, 1, 1, 1), (0, 0), (1, 1))
LENGTHS = [len(mask) for mask in MASKS]


def token_columns(scale: float, seed: int) -> list[torch.Tensor]:
    """Return a float64 tensor for each sample of `MASKS`, with random values around -1."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator, dtype=torch.float64) * scale - 1 for n in LENGTHS]


class CorrectionContract(Contract):
    """The contract of corrections: finite, constant weights; masks only shrink; order and split have no influence."""

    kind = "corrections"
    neutral: ClassVar[bool] = True
    """True if the loss must not change when trainer and engine agree."""
    default_args: ClassVar[Mapping[str, Any]] = {"use_tis": True, "custom_tis_function_path": "the component"}

    def correct(
        self,
        gap: float = 0.5,
        splits: Sequence[Sequence[int]] | None = None,
        leaves: list[torch.Tensor] | None = None,
    ) -> list[Corrected]:
        """Return loss, mask and metrics of each sample if engine and trainer differ by `gap` (standard deviation).

        `leaves` collects the loss of each micro-batch before the correction.
        """
        n = len(MASKS)
        batch = TrainBatch(
            rollout_id=0, tokens=[[0] * (m + 1) for m in LENGTHS], response_lengths=LENGTHS,
            loss_masks=[list(mask) for mask in MASKS], rewards=[0.0] * n, raw_rewards=[0.0] * n, truncated=[0] * n,
            sample_indices=list(range(n)), group_indices=[0] * n, rollout_ids=list(range(n)),
            rollout_mask_sums=[sum(mask) for mask in MASKS],
        )  # fmt: skip
        old, noise = token_columns(0.3, 1), token_columns(gap, 2)
        tensors = TrainTensors(
            loss_masks=[torch.tensor(mask, dtype=torch.float64) for mask in MASKS],
            rollout_log_probs=[a + b + 1 for a, b in zip(old, noise)],
            old_log_probs=old,
        )
        step = Denominators(n, 1, positions=tuple(range(n)), all_reduce=lambda tensor: tensor)
        component = self.resolved.obj
        made = construct(component, self.settings) if inspect.isclass(component) else component
        correct = Corrector(self.settings, made).for_step(batch, tensors, step)
        found: dict[int, Corrected] = {}
        for positions in splits or [range(n)]:
            sizes = [LENGTHS[p] for p in positions]

            def joined(column: list[torch.Tensor], chosen: Sequence[int] = positions) -> torch.Tensor:
                return torch.cat([column[p] for p in chosen])

            loss = joined(token_columns(1.0, 3)).requires_grad_()
            if leaves is not None:
                leaves.append(loss)
            engine = tensors.rollout_log_probs
            assert engine is not None
            inputs = LossInputs(
                loss, joined(old), loss, joined(tensors.loss_masks), sizes, rollout_log_probs=joined(engine)
            )
            new, mask, metrics = correct(inputs, positions, loss)
            parts = (torch.split(new, sizes), torch.split(mask, sizes))
            for i, p in enumerate(positions):
                own = {name: torch.split(value, sizes)[i] for name, value in metrics.items()}
                found[p] = (parts[0][i], parts[1][i], own)
        return [found[p] for p in range(n)]

    @pytest.mark.parametrize("gap", [0.0, 0.5, 40.0])
    def test_results_are_finite_and_masks_only_shrink(self, gap: float) -> None:
        """Check results also if trainer and engine differ extremely."""
        for (loss, mask, metrics), before in zip(self.correct(gap), MASKS, strict=True):
            assert torch.isfinite(loss).all(), f"the corrected loss is not finite: {loss.tolist()}"
            assert ((mask >= 0) & (mask <= torch.tensor(before))).all(), (
                f"a correction may take tokens out of the loss mask {list(before)}, not put any in: {mask.tolist()}"
            )
            for name, value in metrics.items():
                assert torch.isfinite(value).all(), f"metric {name!r} is not finite: {value.tolist()}"
                assert not value.requires_grad, f"metric {name!r} carries a gradient; detach it"

    def test_the_gradient_is_the_weight(self) -> None:
        """The loss is multiplied by a constant, so no token is pushed towards another weight."""
        leaves: list[torch.Tensor] = []
        new = torch.cat([loss for loss, _, _ in self.correct(leaves=leaves)])
        (gradient,) = torch.autograd.grad(new.sum(), leaves[0])
        torch.testing.assert_close(new.detach(), gradient * leaves[0].detach())

    def test_no_split_or_order_changes_anything(self) -> None:
        """Check that a sample's result is the same alone, among other samples, and in another order."""
        whole = self.correct()
        for splits in ([[4, 2], [0], [3, 1]], [[p] for p in reversed(range(len(MASKS)))]):
            for (loss, mask, metrics), (a, b, c) in zip(self.correct(splits=splits), whole, strict=True):
                torch.testing.assert_close((loss, mask), (a, b), rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(metrics, c, rtol=1e-12, atol=1e-12)

    @only_where(lambda suite: suite.neutral)
    def test_agreement_leaves_the_loss_as_it_is(self) -> None:
        """Check that the loss does not change if trainer and engine agree. Skipped with `neutral = False`."""
        for (loss, mask, _), before, plain in zip(self.correct(0.0), MASKS, token_columns(1.0, 3), strict=True):
            torch.testing.assert_close(loss.detach(), plain)
            assert mask.tolist() == list(before)

    def test_ranks_with_equal_samples_count_as_one(self) -> None:
        """A class that sums over ranks takes a mean, so twice the same samples change nothing."""
        component = self.resolved.obj
        if not inspect.isclass(component):
            pytest.skip("a function does not talk to other ranks")
        columns = (torch.cat(token_columns(0.3, 1)), torch.cat(token_columns(0.5, 2)))
        mask = torch.tensor([float(m) for row in MASKS for m in row], dtype=torch.float64)

        def weigh(ranks: int) -> CorrectionOutputs:
            inputs = CorrectionInputs(*columns, mask, LENGTHS, all_reduce=lambda tensor: tensor * ranks)
            found = construct(component, self.settings).weigh(inputs)
            assert isinstance(found, CorrectionOutputs)
            return found

        one, two = weigh(1), weigh(2)
        torch.testing.assert_close(two.weights, one.weights)
        torch.testing.assert_close(two.loss_mask, one.loss_mask)


class LossReducerContract(Contract):
    """The contract of loss reducers: the result is a scalar, a sum over samples, and ignores masked tokens."""

    kind = "loss_reducers"
    default_args: ClassVar[Mapping[str, Any]] = {"rollout_max_response_len": 16, "plugins": {}}

    def reducer(self, masks: Sequence[torch.Tensor], per_token: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the reducer for samples with these masks."""
        made = self.resolved.obj
        lengths = [len(mask) for mask in masks]
        extra = {"args": self.settings} if declared(made, ("args",)) else {}
        reduce: Callable[[torch.Tensor], torch.Tensor] = made(
            [n + 1 for n in lengths], lengths, list(masks), per_token, **extra
        )
        return reduce

    @pytest.mark.parametrize("per_token", [False, True])
    def test_it_is_a_sum_over_samples(self, per_token: bool) -> None:
        """Check that the loss does not depend on how samples are split over micro-batches."""
        masks = [torch.tensor(mask, dtype=torch.float64) for mask in MASKS]
        values = [v * m for v, m in zip(token_columns(1.0, 3), masks)]
        whole = self.reducer(masks, per_token)(torch.cat(values))
        assert whole.numel() == 1, f"a reducer answers a scalar; found shape {tuple(whole.shape)}"
        parts = [self.reducer([m], per_token)(v).reshape(()) for v, m in zip(values, masks)]
        torch.testing.assert_close(torch.stack(parts).sum(), whole.reshape(()))

    def test_gradients_reach_trained_tokens_only(self) -> None:
        """Check that gradients reach every trained token and no other token."""
        masks = [torch.tensor(mask, dtype=torch.float64) for mask in MASKS]
        values = torch.cat(token_columns(1.0, 3)).requires_grad_()
        flat = torch.cat(masks)
        (gradient,) = torch.autograd.grad(self.reducer(masks, False)(values * flat).reshape(()), values)
        assert ((gradient != 0) == (flat != 0)).all(), (
            f"a gradient on every token of the loss mask {flat.tolist()} and on no other; found {gradient.tolist()}"
        )
