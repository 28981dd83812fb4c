"""The base class of advantage estimators: rewards -> advantages -> per-token policy loss, with sensible defaults.

Plugins subclass `EstimatorBase`; the learner and the loss stage call its methods and read the class attributes, never a
name. `shape_rewards` and `shape_turns` see the whole rollout (group statistics belong there), `advantages` sees one
data-parallel rank's samples only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Literal

import torch

from slime_core.errors import PluginError
from slime_core.ops.ratios import clipped_surrogate, sequence_kl, token_kl
from slime_core.protocols import (
    AdvantageInputs,
    Advantages,
    Args,
    LossInputs,
    LossOutputs,
    RewardInputs,
    with_defaults,
)

__all__ = ["AdvantageFn", "EstimatorBase", "as_column", "estimator_class", "with_advantages"]

AdvantageFn = Callable[[Args, dict[str, Any]], None]
"""Function of `--custom-advantage-function-path`; it sets `rollout_data["advantages"]` and `["returns"]`."""


class EstimatorBase:
    """REINFORCE with PPO's clip: the reward of a response is the advantage of each of its tokens."""

    needs_values: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False
    needs_log_probs: ClassVar[bool] = False
    ratio_level: ClassVar[Literal["token", "sequence"]] = "token"
    compares_group: ClassVar[bool] = False
    needs_components: ClassVar[bool] = False
    needs_greedy_baseline: ClassVar[bool] = False
    requires: ClassVar[Mapping[str, object]] = {}
    defaults: ClassVar[Mapping[str, object]] = {}
    ignores: ClassVar[Sequence[str]] = ()

    def __init__(self, args: Args) -> None:
        self.args = args

    def shape_rewards(self, args: Args, inputs: RewardInputs) -> list[float]:
        """Return the rewards unchanged."""
        return [float(reward) for reward in inputs.rewards]

    def shape_turns(self, args: Args, inputs: RewardInputs) -> list[list[float]]:
        """Return the rewards of the turns unchanged; 0.0 for a turn without one."""
        return [[reward or 0.0 for reward in row] for row in inputs.turn_rewards]

    def advantages(self, args: Args, inputs: AdvantageInputs) -> Advantages:
        """Return A_t = R_t = shaped reward, for every token of the response."""
        parts = [mask.new_full(mask.shape, r) for r, mask in zip(inputs.rewards.tolist(), inputs.loss_masks)]
        return Advantages(advantages=parts, returns=list(parts))

    def policy_loss(self, args: Args, inputs: LossInputs) -> LossOutputs:
        """Return PPO's clipped surrogate, on the sequence ratio if `ratio_level` is "sequence".

        Metrics: `pg_clipfrac` (1 where clipped) and `ppo_kl` (old minus new log-probs).
        """
        ppo_kl = self.policy_kl(inputs)
        loss, clipfrac = clipped_surrogate(
            ppo_kl,
            inputs.advantages,
            args.eps_clip,
            args.eps_clip_high,
            args.eps_clip_c,
        )
        return LossOutputs(loss=loss, metrics={"pg_clipfrac": clipfrac, "ppo_kl": ppo_kl.detach()})

    def policy_kl(self, inputs: LossInputs) -> torch.Tensor:
        """Return old minus new log-probs [T] at this estimator's `ratio_level`; the ratio is exp(-value)."""
        if self.ratio_level == "sequence":
            return sequence_kl(inputs.log_probs, inputs.old_log_probs, inputs.loss_mask, inputs.sample_lengths)
        return token_kl(inputs.log_probs, inputs.old_log_probs)


def with_advantages(estimator: type[EstimatorBase], fn: AdvantageFn, source: str) -> type[EstimatorBase]:
    """Return the estimator with advantages by a function; rewards and loss are unchanged.

    The function gets THUDM/slime's `rollout_data`: per-sample lists under its names and those of `AdvantageInputs`
    (missing fields are omitted), and sets `advantages` and `returns`. Messages begin with `source`, flag and value.
    """

    def advantages(self: EstimatorBase, args: Args, inputs: AdvantageInputs) -> Advantages:
        """Call the function. Raises PluginError when it leaves a result out or of the wrong length."""
        tokens = [torch.tensor(row, device=inputs.rewards.device) for row in inputs.rollout_data.get("tokens", ())]
        data = {f.name: getattr(inputs, f.name) for f in fields(inputs) if f.name != "rollout_data"}
        data = {**inputs.rollout_data, "tokens": tokens, **{k: value for k, value in data.items() if value is not None}}
        fn(args, data)
        found = []
        for name in ("advantages", "returns"):
            if name not in data:
                raise PluginError(
                    f'{source} did not set rollout_data["{name}"]: one [response_length] tensor per sample'
                )
            found.append(as_column(data[name], inputs.loss_masks, f'{source}: rollout_data["{name}"]'))
        return Advantages(*found)

    return type("CustomAdvantages", (estimator,), {"advantages": advantages, "needs_log_probs": True})


def as_column(value: object, like: Sequence[torch.Tensor], source: str) -> list[torch.Tensor]:
    """Return the tensors that a user's function set, shaped as `like`. Raises PluginError beginning with `source`."""
    value = list(value) if isinstance(value, torch.Tensor) else value
    if not isinstance(value, Sequence):
        raise PluginError(f"{source} is a {type(value).__name__}; expected a list of {len(like)} tensors")
    try:
        parts = [torch.as_tensor(part, dtype=torch.float32).detach() for part in value]
    except (TypeError, ValueError, RuntimeError) as error:
        raise PluginError(f"{source}: expected a list of tensors: {error}") from error
    shapes, expected = [tuple(part.shape) for part in parts], [tuple(part.shape) for part in like]
    if shapes != expected:
        raise PluginError(f"{source} has shapes {shapes[:8]}; expected one tensor per sample: {expected[:8]}")
    return [part.to(other.device) for part, other in zip(parts, like)]


def estimator_class(found: Any, origin: str) -> type[Any]:
    """Return the component of `--advantage-estimator origin` as a class; `EstimatorBase` supplies optional members.

    A function computes the advantages on top of `EstimatorBase`.
    """
    if isinstance(found, type):
        return with_defaults(found, EstimatorBase)
    return with_advantages(EstimatorBase, found, f"--advantage-estimator {origin}")
