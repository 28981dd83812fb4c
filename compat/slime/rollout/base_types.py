"""`slime.rollout.base_types`: what rollout functions return. The two classes are slime_core's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime import _missing
from slime_core.sample import RolloutFnEvalOutput, RolloutFnTrainOutput


def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """`fn(*args, evaluation=..., **kwargs)`, with a bare list or mapping wrapped into the class it stands for.

    Raises:
        slime_core.errors.RolloutError: It returned something else.
    """
    from slime_core.rollout.stage import eval_output, train_output

    answer = fn(*args, **kwargs, evaluation=evaluation)
    return eval_output(answer) if evaluation else train_output(answer)


__all__ = ["RolloutFnEvalOutput", "RolloutFnTrainOutput", "call_rollout_fn"]
__getattr__ = _missing.names(__name__)
