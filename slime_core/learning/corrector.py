"""Off-policy corrections of the policy loss: log-probs of trainer and engine -> weights and a mask.

Components of kind "corrections" (`--use-tis`, `--custom-tis-function-path`) take `CorrectionInputs`.

A class weighs a whole optimizer step before its first micro-batch; a function with THUDM/slime's signature sees one
micro-batch at a time, loss included. A changed mask takes tokens out of the numerator only; the denominators stay those
of the original masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from slime_core.errors import PluginError, TrainError, rollout_name
from slime_core.learning.tensors import Column, Denominators, TrainTensors, gather
from slime_core.ops.masking import AllReduce
from slime_core.ops.ratios import mismatch_metrics
from slime_core.protocols import Args, LossInputs
from slime_core.sample import TrainBatch

Corrected = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""[T] policy loss, [T] mask, metrics of [T]."""


class Corrector:
    """The correction of a run, or only its metrics, in the form in which the policy loss calls it.

    Args:
        component: A `Correction`, a function with THUDM/slime's signature, or None for the mismatch metrics alone.
        applies: False (`--get-mismatch-metrics` without `--use-tis`): metrics only.
        reports_mismatch: Add the metrics of `ops.ratios.mismatch_metrics`, prefix `mis_`.
    """

    def __init__(
        self,
        args: Args,
        component: Correction | Callable[..., object] | None,
        *,
        applies: bool = True,
        reports_mismatch: bool = False,
    ) -> None:
        self.args = args
        self.applies = applies
        self.reports_mismatch = reports_mismatch
        self._weigh: Callable[[CorrectionInputs], CorrectionOutputs] | None = getattr(component, "weigh", None)
        self._function: Callable[..., object] | None = (
            component if self._weigh is None and callable(component) else None
        )

    def for_step(
        self, batch: TrainBatch, tensors: TrainTensors, denominators: Denominators
    ) -> Callable[[LossInputs, Sequence[int], torch.Tensor], Corrected]:
        """Return the correction of an optimizer step: `(inputs, positions, [T] loss)` of a micro-batch -> `Corrected`.

        Raises:
            TrainError: The samples carry no log-probs of the engine.
        """
        if tensors.rollout_log_probs is None:
            raise TrainError(
                f"{rollout_name(batch.rollout_id)}: off-policy corrections compare the trainer with the engine, but the"
                " samples carry no rollout_log_probs; the generate function must record them"
            )
        train = tensors.old_log_probs if tensors.train_log_probs is None else tensors.train_log_probs
        known: Mapping[int, CorrectionOutputs] = {}
        if self._weigh is not None and train is not None and denominators.all_reduce is not None:
            known = self._over_step(batch, tensors, train, denominators)

        def correct(inputs: LossInputs, positions: Sequence[int], loss: torch.Tensor) -> Corrected:
            policy = gather(tensors.train_log_probs, positions)
            seen = _seen(inputs, inputs.old_log_probs if policy is None else policy)
            metrics: dict[str, torch.Tensor] = {}
            new_loss, mask = loss, inputs.loss_mask
            if self._weigh is not None:
                found = _joined([known[p] for p in positions]) if known else self._weigh(seen)
                new_loss, mask = loss * found.weights, found.loss_mask
                metrics = dict(found.metrics)
            elif self._function is not None:
                new_loss, mask, metrics = self._call(seen, batch, positions, loss)
            if self.reports_mismatch:
                metrics |= _mismatch(seen, inputs, blended=train is None)
            return (new_loss, mask, metrics) if self.applies else (loss, inputs.loss_mask, metrics)

        return correct

    def kept(self, batch: TrainBatch, tensors: TrainTensors, steps: Sequence[Denominators]) -> Column:
        """Return the loss masks without tokens that the correction rejects or weighs 0, before the first of `steps`.

        The masks are unchanged if rejections are known only within a step: with a function, or with a policy that is
        blended in the step.
        """
        train = tensors.old_log_probs if tensors.train_log_probs is None else tensors.train_log_probs
        masks = list(tensors.loss_masks)
        if self.applies and self._weigh is not None and train is not None and tensors.rollout_log_probs is not None:
            for step in steps:
                for position, found in self._over_step(batch, tensors, train, step).items():
                    masks[position] = found.loss_mask * (found.weights != 0)
        return masks

    def _over_step(
        self, batch: TrainBatch, tensors: TrainTensors, train: Column, denominators: Denominators
    ) -> dict[int, CorrectionOutputs]:
        """Compute the weights of every sample of the step on this rank, by position."""
        assert self._weigh is not None
        positions = denominators.positions
        lengths = [batch.response_lengths[p] for p in positions]
        policy, engine = gather(train, positions), gather(tensors.rollout_log_probs, positions)
        mask = gather(tensors.loss_masks, positions)
        assert policy is not None
        assert engine is not None
        assert mask is not None
        staleness = gather(tensors.staleness, positions)
        siblings = [batch.sibling_counts[p] for p in positions]
        found = self._weigh(
            CorrectionInputs(policy, engine, mask, lengths, staleness, denominators.all_reduce, siblings)
        )
        columns = {name: torch.split(value, lengths) for name, value in found.metrics.items()}
        weights, masks = torch.split(found.weights, lengths), torch.split(found.loss_mask, lengths)
        return {
            p: CorrectionOutputs(weights[i], masks[i], {name: parts[i] for name, parts in columns.items()})
            for i, p in enumerate(positions)
        }

    def _call(
        self, seen: CorrectionInputs, batch: TrainBatch, positions: Sequence[int], loss: torch.Tensor
    ) -> Corrected:
        """Call the function with THUDM/slime's arguments: per-sample lists, and the concatenated micro-batch loss."""
        assert self._function is not None
        lengths = seen.sample_lengths
        masks = list(torch.split(seen.loss_mask, lengths))
        answer = self._function(
            args=self.args,
            pg_loss=loss,
            train_log_probs=list(torch.split(seen.train_log_probs, lengths)),
            rollout_log_probs=list(torch.split(seen.rollout_log_probs, lengths)),
            loss_masks=masks,
            total_lengths=[len(batch.tokens[p]) for p in positions],
            response_lengths=lengths,
        )
        name = f"--custom-tis-function-path {self.args.custom_tis_function_path!r}"
        parts = answer if isinstance(answer, tuple) else (answer,)
        if len(parts) != 3 or not isinstance(parts[1], Sequence) or not isinstance(parts[2], Mapping):
            found = ", ".join(type(part).__name__ for part in parts)
            raise PluginError(f"{name}: expected (pg_loss tensor, list of loss_masks, dict of metrics); found {found}")
        new_loss, new_masks, metrics = parts
        mask = torch.cat([torch.as_tensor(m, dtype=loss.dtype, device=loss.device) for m in new_masks])
        shapes = {"pg_loss": new_loss, "loss_masks": mask, **metrics}
        found_shapes = {key: tuple(getattr(value, "shape", ())) for key, value in shapes.items()}
        wrong = [f"{key} {shape}" for key, shape in found_shapes.items() if shape != tuple(loss.shape)]
        if wrong:
            raise PluginError(f"{name}: expected {tuple(loss.shape)} for each result; found {', '.join(wrong)}")
        return new_loss, mask, {key: torch.as_tensor(value).detach().to(loss) for key, value in metrics.items()}


def _seen(inputs: LossInputs, policy: torch.Tensor) -> CorrectionInputs:
    assert inputs.rollout_log_probs is not None
    return CorrectionInputs(
        policy.detach(), inputs.rollout_log_probs, inputs.loss_mask, inputs.sample_lengths, inputs.staleness
    )


def _mismatch(seen: CorrectionInputs, inputs: LossInputs, *, blended: bool) -> dict[str, torch.Tensor]:
    # A blend (`--proximal-policy interpolate`) is part engine: the distance to it is not the trainer's.
    policy = inputs.log_probs.detach() if blended else seen.train_log_probs
    found = mismatch_metrics(policy, seen.rollout_log_probs, seen.loss_mask, seen.sample_lengths)
    return {f"mis_{name}": value for name, value in found.items()}


def _joined(parts: Sequence[CorrectionOutputs]) -> CorrectionOutputs:
    return CorrectionOutputs(
        torch.cat([part.weights for part in parts]),
        torch.cat([part.loss_mask for part in parts]),
        {name: torch.cat([part.metrics[name] for part in parts]) for name in parts[0].metrics},
    )


SETTINGS = (
    *("tis_clip", "tis_clip_low", "tis_level", "tis_mode", "tis_lower_bound", "tis_upper_bound"),
    *("tis_batch_normalize", "use_rs", "rs_level", "rs_lower_bound", "rs_upper_bound"),
    *("rs_veto_threshold", "rs_trust_region", "rs_tr_threshold"),
)
"""All settings that slime's corrections may read; each correction lists its settings in `reads`."""


@dataclass
class CorrectionInputs:
    """Concatenated response tokens of whole samples: [T] tensors without gradients, T = sum(sample_lengths)."""

    train_log_probs: torch.Tensor
    """Log-probs of the trainer's policy at the start of the update (the proximal policy)."""
    rollout_log_probs: torch.Tensor
    """Log-probs of the engine that sampled the tokens (the behaviour policy)."""
    loss_mask: torch.Tensor
    sample_lengths: list[int]
    staleness: torch.Tensor | None = None
    """Weight versions between sampling and this update; None when every token is fresh."""
    all_reduce: AllReduce | None = None
    """Sum over data-parallel ranks; the samples of all ranks together form one optimizer step. None when only one
    micro-batch is known at a time (`--proximal-policy interpolate`)."""
    sibling_counts: list[int] | None = None
    """[n] fan-out siblings of each sample, itself included, for means over sequences, which count a rollout
    once; None if no sample has siblings."""


@dataclass
class CorrectionOutputs:
    """Weights and mask that a correction applies to the policy loss.

    The corrected loss is loss_t * weights_t * loss_mask_t over unchanged denominators.
    """

    weights: torch.Tensor
    """[T]"""
    loss_mask: torch.Tensor
    """[T] the mask without rejected tokens."""
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """name -> [T]; logged as `train/<name>`, a mean over the tokens of the original mask."""


class Correction(Protocol):
    """Off-policy correction by importance weights and rejection. Constructed as `cls(args)`.

    Called on every rank once per optimizer step with the rank's samples of the step, so that sums and means over the
    step (with `all_reduce`) do not depend on how samples are split. THUDM/slime's functions, which see one micro-batch,
    are accepted too.
    """

    whole_step: bool
    """True if the correction needs `CorrectionInputs.all_reduce`."""
    reads: ClassVar[tuple[str, ...]]
    """Settings that this correction reads; setting any other correction's setting is an error."""

    def weigh(self, inputs: CorrectionInputs) -> CorrectionOutputs:
        """Return weights and mask; no gradient flows through them."""
