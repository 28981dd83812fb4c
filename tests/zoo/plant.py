"""Ways to plant a bug into a run in this process: a function of the run is wrapped or replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

Plant = Callable[[pytest.MonkeyPatch], None]


def wrapped(target: str, around: Callable[..., Any]) -> Plant:
    """`around(original, *args, **kwargs)` instead of the function at the dotted path."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = resolve_name(":".join(_split(target)))
        patch.setattr(target, lambda *args, **kwargs: around(original, *args, **kwargs))

    return plant


def _split(target: str) -> tuple[str, str]:
    """Module and attribute of a dotted path."""
    parts = target.split(".")
    for size in range(len(parts) - 1, 0, -1):
        try:
            import_module(".".join(parts[:size]))
        except ImportError:
            continue
        return ".".join(parts[:size]), ".".join(parts[size:])
    raise ValueError(target)


def nothing(patch: pytest.MonkeyPatch) -> None:
    """The settings, or a component that they name, are the bug."""


def batches(change: Callable[[Any], None]) -> Plant:
    """Change each batch between rollout and trainer."""

    def around(original: Any, self: Any, rollout_id: int, batch: Any) -> Any:
        change(batch)
        return original(self, rollout_id, batch)

    return wrapped("slime_core.learning.learner.Learner.train", around)


def samples(change: Callable[[list[list[Any]]], None]) -> Plant:
    """Change the groups of each rollout before they become a batch."""

    def around(original: Any, self: Any, rollout_id: int, groups: Any, *rest: Any) -> Any:
        change(groups)
        return original(self, rollout_id, groups, *rest)

    return wrapped("slime_core.rollout.stage.RolloutStage._describe", around)


def normalising(by: Callable[[list[float], list[int]], list[float]]) -> Plant:
    """Another formula for the group's rewards: (rewards, groups) -> shaped."""
    return wrapped("slime_estimator_grpo.group_normalize", lambda _, r, g, *rest: by(list(r), list(g)))


def advantages(change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Plant:
    """Change the advantages of each rollout: lists of [response_length]."""

    def around(original: Any, *args: Any) -> Any:
        found = original(*args)
        return replace(found, advantages=change(found.advantages))

    return wrapped("slime_core.estimator.EstimatorBase.advantages", around)


def log_probs(change: Callable[..., Any]) -> Plant:
    """Around the trainer's `token_log_probs(hidden, head, targets, temperature=...)`."""
    return wrapped("slime_core.trainers.embedded.trainer.token_log_probs", change)


def after_steps(change: Callable[[Any, dict[str, torch.Tensor]], None]) -> Plant:
    """Change the weights after each optimizer step; gets the optimizer and copies from before it."""

    def around(original: Any, self: Any) -> Any:
        before = {name: self._view(self.values, name).clone() for name in self.shapes}
        found = original(self)
        change(self, before)
        return found

    return wrapped("slime_core.trainers.embedded.optimizer.FlatAdamW.step", around)


def before_steps(change: Callable[[Any], None]) -> Plant:
    """Change the gradients before each optimizer step."""

    def around(original: Any, self: Any) -> Any:
        change(self)
        return original(self)

    return wrapped("slime_core.trainers.embedded.optimizer.FlatAdamW.step", around)


def sent(change: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None]) -> Plant:
    """Change what is sent to the engine: gets the weights, and the ones of the first push."""
    first: dict[str, torch.Tensor] = {}

    def around(original: Any, self: Any) -> Iterator[tuple[str, torch.Tensor]]:
        weights = {name: tensor.detach().clone() for name, tensor in original(self)}
        first.update({} if first else weights)
        change(weights, first)
        return iter(weights.items())

    return wrapped("slime_core.weights.collective.SharedWeights.named_weights", around)


def rolled(rows: Sequence[Any]) -> list[Any]:
    """Each row's successor."""
    return [*rows[1:], rows[0]]
