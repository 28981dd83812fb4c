"""Checks of rewards and advantages, and of whether they carry a training signal."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from slime_hooks.invariants.incident import CENTRED, Incident, moments
from slime_hooks.invariants.trained import Trained

_SCALED = ("grpo", "gspo", "cispo")
_EPSILON = 1e-6
"""Epsilon added to the deviation; rewards with a deviation near epsilon do not deviate by 1 after scaling."""
_PATIENCE = 3


def normalised(it: Trained) -> Iterator[Incident]:
    """Check that a group's shaped rewards add up to 0 if the estimator centres, and deviate by 1 if it scales.

    Several adapters are compared within a group each by itself, and not looked at here.
    """
    args, batch = it.args, it.batch
    by_others = args.custom_reward_post_process_path or args.custom_convert_samples_to_train_data_path
    if args.advantage_estimator not in CENTRED or not args.rewards_normalization or by_others or args.lora_adapters:
        return
    against = compared = 0
    for group, positions in it.groups.items():
        if len({batch.rollout_ids[p] for p in positions}) < 2:
            continue
        shaped, raw = [batch.rewards[p] for p in positions], [batch.raw_rewards[p] for p in positions]
        spread, own, together = moments(shaped, raw)
        total = math.fsum(batch.rewards[p] / batch.sibling_counts[p] for p in positions)
        if abs(total) > 1e-3 * len(shaped) * max(1.0, *map(abs, shaped)) and not it.withholds:
            yield Incident(
                "advantages_add_up",
                "a group's advantages do not add up to 0: rows that are not trained on count in its statistics, a row"
                " was lost or exchanged after it was normalised, parts of a rollout count as rollouts, or the mean is"
                " not the group's",
                f"group {group}: {len(shaped)} rewards that add up to {total:.4g}",
            )
        plain = all(batch.sibling_counts[p] == 1 for p in positions) and not it.withholds
        scaled = args.advantage_estimator in _SCALED and args.grpo_std_normalization and plain and spread > 0.02
        if scaled and abs(spread - 1.0) > 0.02 and abs(spread - own / (own + _EPSILON)) > 0.02:
            yield Incident(
                "advantages_deviate_by_one",
                "a group's rewards are not divided by their own standard deviation: it is taken over the batch or"
                " over the wrong axis, or biased",
                f"group {group}: normalised rewards deviate by {spread:.4g}, not by 1",
            )
        compared += abs(together) > 1e-6
        against += together < -1e-6
    if compared and against > 0.8 * compared:
        yield Incident(
            "better_is_better",
            "the better answer of a group has the lower advantage: a sign is turned, or rewards go to other samples",
            f"in {against} of {compared} groups",
        )


def advantages_of_rewards(it: Trained) -> Iterator[Incident]:
    """Check that GRPO's advantage of every trained token is its sample's shaped reward."""
    args, local = it.args, it.local
    added = args.kl_coef or args.use_opd or args.normalize_advantages or args.rollout_data_postprocess_path
    if args.advantage_estimator not in _SCALED or added or args.custom_advantage_function_path:
        return
    lengths = torch.tensor(it.local.response_lengths)
    positions = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    advantages, mask = it.advantages, it.mask
    shaped = [it.batch.rewards[at] for at in it.indices]
    rewards = torch.tensor(shaped, dtype=advantages.dtype)[positions].to(advantages.device)
    off = (advantages - rewards).abs() * mask
    for token in (off > 1e-3 * rewards.abs().clamp(min=1.0)).nonzero().flatten().tolist()[:1]:
        position = int(positions[token])
        yield Incident(
            "advantage_of_its_sample",
            "advantages are not those of their samples' rewards: rows are in another order, the sign is turned, or"
            " they are scaled, broadcast, discounted or clipped on the way",
            f"sample {local.sample_indices[position]}: reward {shaped[position]:.4g}, off by {float(off[token]):.4g}",
        )


class Signal:
    """A check over several rollouts that samples carry gradient."""

    def __init__(self) -> None:
        self._flat = self._same = 0

    def incidents(self, it: Trained) -> Iterator[Incident]:
        """Report rollouts in a row without gradient, or with rewards that differ between prompts but not answers."""
        self._flat = 0 if it.carries else self._flat + 1
        groups = [{it.batch.raw_rewards[p] for p in members} for members in it.groups.values() if len(members) > 1]
        values = set().union(*groups) if groups else set()
        same = len(values) > 1 and all(len(rewards) == 1 for rewards in groups)
        self._same = self._same + 1 if same else 0
        if self._same >= _PATIENCE:
            yield Incident(
                "rewards_tell_answers_apart",
                "rewards differ between prompts and never within a group: one reward goes to the whole group, or the"
                " grader reads the prompt or the label instead of the answer",
                f"{_PATIENCE} rollouts, {len(groups)} groups each",
            )
        if self._flat >= _PATIENCE:
            yield Incident(
                "samples_carry_gradient",
                "no sample carries gradient: all rewards of every group are equal (too easy, too hard, or the grader"
                " always says the same), or advantages are lost",
                f"{_PATIENCE} rollouts, rewards {sorted(values)[:4]}",
            )
