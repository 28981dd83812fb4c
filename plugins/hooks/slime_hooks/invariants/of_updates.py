"""Compare the weights' change with Adam's update from its moments, and check that no pass's gradient is missing.

For trainers in one process whose `model` is a torch module and whose `optimizer` has `moments()` and `moment_steps`;
not with `--lora-adapters`, each of which has an optimizer of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from slime_core import Args
from slime_hooks.invariants.incident import Incident
from slime_hooks.invariants.trained import Trained

_TENSORS, _ELEMENTS = 32, 256
"""Number of checked tensors, spread over the model, and number of checked elements of each."""
_OFF = 0.03
"""Relative error that exceeds rounding errors."""


class _State(NamedTuple):
    """Parts of the weights, gradients and moments, concatenated, in float64."""

    values: torch.Tensor
    grads: torch.Tensor
    """Clipped gradients of the last step."""
    mean: torch.Tensor
    square: torch.Tensor
    decayed: torch.Tensor
    """True for parameters with weight decay: matrices."""
    steps: int
    """Number of steps in the moments."""


class Updates:
    """The state after the previous rollout, and the gradients of later passes."""

    def __init__(self) -> None:
        self._before: _State | None = None
        self._rollout = -2
        self._passes: list[torch.Tensor] = []
        """Gradient of one parameter from each backward pass, before it is accumulated."""
        self._watched: torch.nn.Parameter | None = None

    def incidents(self, it: Trained) -> Iterator[Incident]:
        """Compare this rollout's update with Adam's, and its gradient with the sum of its passes'."""
        model, optimizer = getattr(it.trainer, "model", None), getattr(it.trainer, "optimizer", None)
        alone = getattr(it.trainer, "world_size", 1) == 1 and not it.args.lora_adapters
        if not isinstance(model, torch.nn.Module) or not alone or not hasattr(optimizer, "moment_steps"):
            return
        named = {n: p for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}
        before, now, rollout = self._before, _state(named, optimizer), it.batch.rollout_id
        next_one, self._before, self._rollout = rollout == self._rollout + 1, now, rollout
        known = next_one and bool(it.steps) and not any(s.metrics.get("skipped_steps") for s in it.steps)
        yield from self._accumulated(it, named, known=known)
        if known and before is not None and now is not None and not it.args.reset_optimizer_states:
            counted = now._replace(steps=before.steps + len(it.steps))
            yield from _moved(it.args, before, counted, [step.metrics["lr"] for step in it.steps])

    def _accumulated(self, it: Trained, named: dict[str, torch.nn.Parameter], *, known: bool) -> Iterator[Incident]:
        """Check that the last step's gradient is the sum of its passes' gradients, scaled by clipping."""
        passes, watched, self._passes = self._passes, self._watched, []
        if watched is None or watched.grad is None:
            self._watched = min(named.values(), key=torch.Tensor.numel, default=None)
            if self._watched is not None:
                self._watched.register_hook(self._note)  # type: ignore[no-untyped-call]
            return
        if not known or not passes or it.tensors.advantages is None:
            return
        norm, limit = it.steps[-1].metrics.get("grad_norm", 0.0), it.args.clip_grad
        scale = limit / (norm + 1e-6) if limit and norm > limit else 1.0
        found, total = _part(watched.grad).double(), torch.zeros(len(passes[0]), dtype=torch.float64)
        total, least = total.to(found.device), _least(len(passes), len(it.steps))
        for number, part in enumerate(reversed(passes), 1):
            total = total + part.double() * scale
            if number >= least and float((found - total).abs().max()) <= 1e-3 * float(total.abs().max()) + 1e-12:
                return
        yield Incident(
            "gradient_of_every_pass",
            "the gradient that moved the weights is not the sum of the micro-batches': it is cleared between them, or"
            " one is lost",
            f"{len(passes)} backward passes in {len(it.steps)} steps; no sum of the last ones is the gradient",
        )

    def _note(self, grad: torch.Tensor) -> None:
        self._passes.append(_part(grad).clone())


def _least(passes: int, steps: int) -> int:
    """Return the minimum number of passes of the last step; steps may differ by a few passes."""
    return passes if steps == 1 else max(1, min(2, passes // steps - 1))


def _part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)[:_ELEMENTS]


def _state(named: dict[str, torch.nn.Parameter], optimizer: Any) -> _State | None:
    moments = optimizer.moments()
    names = [name for name in named if f"exp_avg.{name}" in moments]
    names = names[:: max(1, len(names) // _TENSORS)]
    if not names:
        return None

    def together(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([_part(part) for part in parts]).double()

    values = [named[name] for name in names]
    decayed = [torch.full((min(p.numel(), _ELEMENTS),), p.dim() > 1, device=p.device) for p in values]
    first, second = (together([moments[f"{kind}.{name}"] for name in names]) for kind in ("exp_avg", "exp_avg_sq"))
    grads = together([p.grad for p in values if p.grad is not None])
    return _State(together(values), grads, first, second, torch.cat(decayed), optimizer.moment_steps)


def _moved(args: Args, before: _State, now: _State, rates: Sequence[float]) -> Iterator[Incident]:
    """Compare the parameters' change with the update rule.

    For one or two steps the update is known up to rounding; for more steps only a bound on its size is known.
    """
    wanted, steps = before.values, len(rates)
    if steps <= 2:
        states = [now] if steps == 1 else [_undone(args, now), now]
        for state, rate in zip(states, rates):
            decay = state.decayed * (rate * args.weight_decay)
            wanted = wanted * (1 - decay) - rate * _direction(args, state)
        wanted, moved = wanted - before.values, now.values - before.values
        size = float(wanted.square().mean().sqrt())
        ratio = float((wanted * moved).sum()) / max(float(wanted.square().sum()), 1e-300)
        allowed = 1 - _OFF, 1 + _OFF
    else:
        size = sum(rates) * float(_direction(args, now).square().mean().sqrt())
        ratio = float((now.values - before.values).square().mean().sqrt()) / max(size, 1e-300)
        allowed = 0.3 / steps**0.5, 5.0
    if size < 1e-7 * float(before.values.square().mean().sqrt()):
        return
    if not allowed[0] <= ratio <= allowed[1]:
        yield Incident(
            "update_as_set",
            "the weights do not move as Adam moves them at the learning rate that is reported: the optimizer has"
            " another rate (the schedule does not reach it, or it is scaled), its bias correction is missing, or its"
            " moments are not those of these gradients",
            f"{ratio:.3g} times as far, in {steps} steps at {rates[-1]:.3g}",
        )


def _undone(args: Args, now: _State) -> _State:
    """Return the state with the moments before the last step, whose gradient is known."""
    mean = (now.mean - (1 - args.adam_beta1) * now.grads) / args.adam_beta1
    square = (now.square - (1 - args.adam_beta2) * now.grads.square()) / args.adam_beta2
    return now._replace(mean=mean, square=square.clamp(min=0.0), steps=now.steps - 1)


def _direction(args: Args, state: _State) -> torch.Tensor:
    """Return Adam's step at rate 1, with bias correction (Kingma & Ba, 2015)."""
    mean = state.mean / (1 - args.adam_beta1**state.steps)
    square = state.square / (1 - args.adam_beta2**state.steps)
    return mean / (square.sqrt() + args.adam_eps)
