"""How the policy loss's tokens become one number, when not by the default mean.

A reducer (`--custom-pg-loss-reducer-function-path`) is made per micro-batch from lengths and masks. The policy loss
divides what it returns by the step's number of rollouts over all ranks (with `--calculate-per-token-loss` by its number
of unmasked tokens), like THUDM/slime. A reducer must be a sum of per-sample terms. One that takes a mean over its
micro-batch makes the loss depend on how samples are split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slime_core.errors import ConfigError, PluginError
from slime_core.ops.masking import masked
from slime_core.protocols import Args
from slime_core.workers.call import user_code

MakeReducer = Callable[..., Callable[[torch.Tensor], torch.Tensor]]
"""(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> ([T] -> scalar)."""


def constant(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    calculate_per_token_loss: bool,
    args: Args,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Dr. GRPO's (Liu et al., 2025): the sum over a response's tokens / `--rollout-max-response-len`.

    Unlike a mean over the response, every token weighs the same in every response, so long wrong answers are not
    favoured. With `--calculate-per-token-loss` the plain sum, which is divided by the step's tokens.

    Raises:
        ConfigError: No `--rollout-max-response-len`.
    """
    if not args.rollout_max_response_len:
        raise ConfigError("loss reducer 'constant' divides by --rollout-max-response-len N, which is not set")
    divisor = 1 if calculate_per_token_loss else args.rollout_max_response_len
    mask = torch.cat(list(loss_masks))
    return lambda values: masked(values, mask.to(values.dtype)).sum() / divisor


def reduced(
    make: MakeReducer,
    args: Args,
    loss: torch.Tensor,
    mask: torch.Tensor,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> torch.Tensor:
    """The micro-batch's sum by a reducer, a scalar.

    Args:
        make: Makes the reducer.
        args: The run's settings.
        loss: [T] per-token loss.
        mask: [T] after corrections; masked tokens of `loss` reach the reducer as 0.
        total_lengths: [n] prompt and response tokens.
        response_lengths: [n].

    Raises:
        PluginError: The reducer raised, or the result is no scalar tensor.
    """
    masks = list(torch.split(mask, list(response_lengths)))
    name = f"--custom-pg-loss-reducer-function-path {args.custom_pg_loss_reducer_function_path!r}"
    with user_code(name):
        reduce = make(list(total_lengths), list(response_lengths), masks, args.calculate_per_token_loss)
        value = reduce(torch.where(mask != 0, loss, torch.zeros_like(loss)))
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise PluginError(f"{name}: the reducer must return a scalar tensor; found {found}")
    return value.reshape(())
