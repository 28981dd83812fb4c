"""Trained parameters -> one flat buffer with one flat gradient, and AdamW on it.

A tiny model's step is dominated by per-tensor calls, so values, gradients and moments live in one buffer each and the
module's parameters become views of it; summing gradients over ranks, their norm, clipping and the update are then a
handful of calls. `p.grad` is such a view too, so gradients are cleared with `zero_grad` here, never by setting `p.grad
= None`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from slime_core.errors import ConfigError, TrainError
from slime_core.ops import l2_norm
from slime_core.protocols import Args
from slime_embedded.models.decoder import Decoder
from slime_embedded.models.storages import Storages
from slime_embedded.trainer.parallel import DataParallel
from slime_embedded.trainer.schedule import LearningRateSchedule
from slime_embedded.trainer.settings import TrainerSettings

_ALIGNMENT = 16
"""Elements a parameter's offset is rounded up to, so that every view starts on a cache line."""
MAX_CONSECUTIVE_SKIPS = 5
"""Steps in a row without finite gradients after which the run stops."""


@dataclass(frozen=True)
class AdamSettings:
    """AdamW (Loshchilov & Hutter, 2019) with Megatron's flag names."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    stateless: bool = False
    """Every step is a first step: no moments, `lr * g / (|g| + eps)`."""

    @classmethod
    def from_args(cls, args: Args) -> AdamSettings:
        """Read the flags. Raises ConfigError for another optimizer."""
        if args.optimizer != "adam":
            raise ConfigError(f"--optimizer {args.optimizer}: the embedded trainer knows only 'adam' (AdamW)")
        return cls(
            beta1=args.adam_beta1,
            beta2=args.adam_beta2,
            eps=args.adam_eps,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
            stateless=args.use_stateless_adam,
        )


class FlatAdamW:
    """AdamW over all trained parameters; biases and other 1-D parameters are not decayed, as in Megatron.

    Args:
        parameters: HF names and leaf tensors; their data and gradients are moved into flat buffers.
        settings: Betas, decay, clipping.
        schedule: Learning rate by step.
        parallel: Peers whose gradients are summed.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        settings: AdamSettings,
        schedule: LearningRateSchedule,
        parallel: DataParallel,
    ) -> None:
        named = dict(parameters)
        assert named, "nothing to optimize"
        self.settings, self.schedule, self._parallel = settings, schedule, parallel
        self.steps = 0
        """Optimizer steps taken; drives the schedule."""
        self._skips_in_a_row = 0
        decayed = [name for name, p in named.items() if p.dim() > 1]
        plain = [name for name, p in named.items() if p.dim() <= 1]
        self._where: dict[str, tuple[int, torch.Size]] = {}
        boundary = self._place(decayed, named, 0)
        total = self._place(plain, named, boundary)
        self.values = torch.zeros(total, device=parallel.device)
        self.grads = torch.zeros(total, device=parallel.device)
        for name, parameter in named.items():
            view = self._view(self.values, name)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = self._view(self.grads, name)
        moments = 0 if settings.stateless else total
        self._exp_avg = torch.zeros(moments, device=parallel.device)
        self._exp_avg_sq = torch.zeros(moments, device=parallel.device)
        self._gradients = Storages([self.grads])
        self._on_device = Storages([self._exp_avg, self._exp_avg_sq])
        self._on_host: list[torch.Tensor] = []
        """The moments while they are offloaded from a GPU; kept afterwards, since pinning memory takes long."""
        spans = [(0, boundary, settings.weight_decay), (boundary, total, 0.0)]
        flats = (self.values, self.grads, self._exp_avg, self._exp_avg_sq)
        self._parts = [
            ([flat[start:end] for flat in flats], torch.zeros((), device=parallel.device), decay)
            for start, end, decay in spans
            if end > start
        ]
        """Values, gradients and both moments of a stretch, the steps they have seen, and its weight decay."""

    def _place(self, names: list[str], named: Mapping[str, torch.nn.Parameter], offset: int) -> int:
        for name in names:
            self._where[name] = (offset, named[name].shape)
            offset += math.ceil(named[name].numel() / _ALIGNMENT) * _ALIGNMENT
        return offset

    def _view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        offset, shape = self._where[name]
        return flat[offset : offset + shape.numel()].view(shape)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every trained parameter."""
        return {name: tuple(shape) for name, (_, shape) in self._where.items()}

    @torch.no_grad()
    def offload(self) -> None:
        """Free the gradients, and on a GPU move the moments to pinned host memory; on a CPU they are there already."""
        self._gradients.free()
        if self.values.device.type == "cpu" or self._on_device.freed:
            return
        moments = (self._exp_avg, self._exp_avg_sq)
        self._on_host = self._on_host or [torch.empty_like(m, device="cpu", pin_memory=True) for m in moments]
        for host, moment in zip(self._on_host, moments, strict=True):
            host.copy_(moment)
        self._on_device.free()
        torch.cuda.empty_cache()  # for other processes on the device

    @torch.no_grad()
    def onload(self) -> None:
        """Take the memory again: gradients of zero, and the moments as they were."""
        if self._gradients.freed:
            self._gradients.allocate()
            self.grads.zero_()
        if self._on_device.freed:
            self._on_device.allocate()
            for host, moment in zip(self._on_host, (self._exp_avg, self._exp_avg_sq), strict=True):
                moment.copy_(host)

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self.grads.zero_()

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Sum gradients over ranks, clip, update.

        A step whose gradients are not finite is skipped: weights, moments and schedule stay as they are.

        Returns:
            `grad_norm` before clipping, `lr` of this step, `skipped_steps` 0 or 1.

        Raises:
            TrainError: `MAX_CONSECUTIVE_SKIPS` steps in a row were skipped.
        """
        norm = self._norm()
        lr = self.schedule.at(self.steps)
        if not math.isfinite(norm):
            self._skips_in_a_row += 1
            if self._skips_in_a_row >= MAX_CONSECUTIVE_SKIPS:
                raise TrainError(
                    f"gradient norm was {norm} in {self._skips_in_a_row} optimizer steps in a row; the weights are"
                    " those before the first of them. Look at train/loss and the rewards, or lower --lr"
                )
            return {"grad_norm": norm, "lr": lr, "skipped_steps": 1.0}
        self._skips_in_a_row = 0
        limit = self.settings.clip_grad
        if limit and norm > limit:
            self.grads.mul_(limit / (norm + 1e-6))
        for flats, step, weight_decay in self._parts:
            self._update(flats, step, lr, weight_decay)
        self.steps += 1
        return {"grad_norm": norm, "lr": lr, "skipped_steps": 0.0}

    def _norm(self) -> float:
        """Sum the gradients over ranks, and return their norm."""
        self._parallel.sum_in_buckets_(self.grads)
        return float(l2_norm([self.grads]))

    def _update(self, flats: list[torch.Tensor], step: torch.Tensor, lr: float, weight_decay: float) -> None:
        s = self.settings
        values, grads, exp_avg, exp_avg_sq = flats
        if s.stateless:
            values.mul_(1.0 - lr * weight_decay)
            values.addcdiv_(grads, grads.abs().add_(s.eps), value=-lr)
            return
        adamw(
            [values],
            [grads],
            [exp_avg],
            [exp_avg_sq],
            [],
            [step],
            fused=True,
            amsgrad=False,
            beta1=s.beta1,
            beta2=s.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=s.eps,
            maximize=False,
        )

    def reset_moments(self) -> None:
        """Forget both moments and their bias-correction count; the schedule goes on."""
        self._exp_avg.zero_()
        self._exp_avg_sq.zero_()
        self._set_moment_steps(0)

    @property
    def moment_steps(self) -> int:
        """Steps the moments have seen since the start or the last reset."""
        return int(self._parts[0][1])

    def _set_moment_steps(self, steps: int) -> None:
        for _, step, _ in self._parts:
            step.fill_(steps)

    def moments(self) -> dict[str, torch.Tensor]:
        """`exp_avg.<name>` and `exp_avg_sq.<name>` views of every trained parameter, on the host while they are
        offloaded; empty when stateless."""
        if self.settings.stateless:
            return {}
        flats = self._on_host if self._on_device.freed else (self._exp_avg, self._exp_avg_sq)
        both = zip(("exp_avg", "exp_avg_sq"), flats, strict=True)
        return {f"{kind}.{name}": self._view(flat, name) for kind, flat in both for name in self._where}

    def restore(self, steps: int, moment_steps: int) -> None:
        """Set the counters; the moments themselves are filled through the views of `moments`."""
        self.steps = steps
        self._set_moment_steps(moment_steps)


logger = logging.getLogger(__name__)


def trained_parameters(model: Decoder, settings: TrainerSettings) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and parameters to optimize; freezes the others. Raises as `CommonSettings.trained`."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    chosen, warnings = settings.trained([(name, "") for name in trainable])
    for name, parameter in trainable.items():
        parameter.requires_grad_(name in chosen)
    for warning in warnings:
        logger.warning("%s", warning)
    return [(name, parameter) for name, parameter in trainable.items() if name in chosen]
