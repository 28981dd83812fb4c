"""GiGPO: a group of responses, and in it groups of actions from the same state (Feng et al., arXiv 2505.10978, 2025).

A_ik = (R_i - mean) / (std + 1e-6) + step_weight * (G_ik - mean_s) / (std_s + 1e-6): the episode's part is GRPO's; in
the step's part G_ik = sum over l >= k of gamma^(l - k) r_il is compared with all turns of the prompt's group that began
in the same state s (an anchor state), in this response or another. A state that was seen once has no step part.
`--disable-grpo-std-normalization` leaves out both divisions, the paper's F_norm = 1. Brings the paper's `--gamma 0.95`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from slime_core import Args, PluginOptions, RewardInputs, options
from slime_core.ops import group_normalize
from slime_estimators.turns import SampleAndTurns, TurnOptions, numbered, returns, turn_rewards


class Options(TurnOptions):
    """`plugins.gigpo.*`"""

    step_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the part of anchor states."""


class GiGPO(SampleAndTurns):
    """Returns of episodes by group, and of turns by the state that they began in."""

    Options: ClassVar[type[PluginOptions]] = Options
    defaults: ClassVar[Mapping[str, Any]] = {"gamma": 0.95}

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self.chosen = options(args, "gigpo", Options)

    def shape_rewards(self, args: Args, inputs: RewardInputs) -> list[float]:
        """[n] sums of the turns' rewards, normalised within each `group_index`."""
        rows = zip(turn_rewards(inputs, self.chosen.on_top), inputs.rewards)
        totals = [sum(row) if row else reward for row, reward in rows]
        return group_normalize(totals, inputs.group_indices, args.grpo_std_normalization, inputs.rollout_ids)

    def shape_turns(self, args: Args, inputs: RewardInputs) -> list[list[float]]:
        """[n][turns] returns of turns, normalised within the turns of the group with the same state."""
        found = [returns(row, args.gamma) for row in turn_rewards(inputs, self.chosen.on_top)]
        places = [(i, k) for i, row in enumerate(found) for k in range(len(row))]
        anchors = [(inputs.group_indices[i], inputs.state_ids[i][k]) for i, k in places]
        members = [(inputs.rollout_ids[i], k) for i, k in places]  # of fan-out siblings the same turn counts once
        shaped = group_normalize(
            [found[i][k] for i, k in places], numbered(anchors), args.grpo_std_normalization, numbered(members)
        )
        for (i, k), value in zip(places, shaped):
            found[i][k] = self.chosen.step_weight * value
        return found
