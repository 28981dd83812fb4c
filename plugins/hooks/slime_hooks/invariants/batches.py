"""Check a trained rollout and yield incidents; the checks are in `of_rewards`, `of_tokens`, `of_steps`, `of_updates`.

`Batches` keeps state between rollouts for the checks that need more than one rollout.
"""

from __future__ import annotations

from collections.abc import Iterator

from slime_hooks.invariants.incident import Incident
from slime_hooks.invariants.of_rewards import Signal, advantages_of_rewards, normalised
from slime_hooks.invariants.of_steps import (
    Weights,
    gradient_of_the_loss,
    learning_rate,
    loss_of_its_terms,
    loss_of_the_batch,
    ratio_one,
)
from slime_hooks.invariants.of_tokens import Gaps, References, mask_of_the_sampled, versions_known
from slime_hooks.invariants.of_updates import Updates
from slime_hooks.invariants.trained import Trained

__all__ = ["Batches", "Trained"]


_FIRST, _EVERY = 5, 16
"""Weights, gradients and updates are compared in the first `_FIRST` rollouts of a process, and in 2 of `_EVERY`."""


class Batches:
    """Checks of the invariants of every trained rollout, in a process."""

    def __init__(self) -> None:
        self._signal, self._gaps, self._references, self._weights = Signal(), Gaps(), References(), Weights()
        self._updates, self._rollouts = Updates(), 0

    def incidents(self, it: Trained) -> Iterator[Incident]:
        """Yield violated invariants; for losses without advantages (SFT), check only those of any optimizer step."""
        self._rollouts += 1
        closely, moved = self._rollouts <= _FIRST or self._rollouts % _EVERY < 2, False
        if closely:
            moved = yield from self._weights.incidents(it)
            yield from self._updates.incidents(it)
        yield from learning_rate(it)
        if it.tensors.advantages is None:
            return
        yield from normalised(it)
        yield from advantages_of_rewards(it)
        yield from self._signal.incidents(it)
        yield from mask_of_the_sampled(it)
        yield from versions_known(it)
        yield from self._gaps.incidents(it)
        yield from self._references.incidents(it, moved=moved)
        if it.steps:
            yield from ratio_one(it)
            yield from loss_of_its_terms(it)
            yield from loss_of_the_batch(it)
            if closely:
                yield from gradient_of_the_loss(it)
