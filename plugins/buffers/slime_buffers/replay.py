"""Trains on finished groups again: a limited share of each rollout, for a limited number of uses and weight versions.

A replayed group enters the batch as it was: its responses, rewards, log-probs of the rollout and weight versions. Its
tokens come from an older policy than the one that is trained, so the loss must know the rollout's log-probs:
`--use-tis` (importance weights against recomputed old log-probs) or `--use-rollout-logprobs` (PPO's ratio itself).
Without either the groups would count as the current policy's own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from slime_core import Args, BufferBase, Group, PluginOptions, Sample, SampleStatus, options
from slime_core.errors import ConfigError

MARK = "replayed"
"""Entry of `sample.metadata` of a replayed group: how often it has been replayed, this time included."""


class Options(PluginOptions):
    """Limits of reuse."""

    share: float = Field(default=0.25, gt=0, lt=1)
    """Part of --rollout-batch-size that may be replayed groups."""
    max_uses: int = Field(default=1, ge=1)
    """How often a group is trained on again."""
    max_age: int = Field(default=4, ge=1)
    """Largest distance of a group's oldest token to the newest weights, in weight versions."""
    capacity: int = Field(default=1024, ge=1)
    """Groups kept; the oldest go first."""
    order: Literal["newest", "random"] = "newest"
    """Which of them is replayed next."""
    uncorrected: bool = False
    """Replay although the loss does not correct for the older policy."""


@dataclass
class _Kept:
    group: Group
    uses: int
    out: bool = False
    """Handed out and not trained on yet: a batch with the group twice would take its samples for siblings."""


class Buffer(BufferBase):
    """Waiting groups first in, first out; kept ones by their group index."""

    drops = True  # a replayed group that was given back and has grown too old

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self._options = chosen = options(args, "replay", Options)
        self.replays = chosen.max_uses
        if not (args.use_tis or args.use_rollout_logprobs or chosen.uncorrected):
            raise ConfigError(
                "the replay buffer trains on groups of older policies, so it needs --use-tis or --use-rollout-logprobs;"
                " to do without a correction, type --set plugins.replay.uncorrected=true"
            )
        if args.mask_offpolicy_in_partial_rollout:
            raise ConfigError(
                "the replay buffer trains on tokens of earlier rollouts, which --mask-offpolicy-in-partial-rollout"
                " excludes; drop one of them"
            )
        self._kept: dict[int, _Kept] = {}
        self._quota = self._per_rollout = int(chosen.share * args.rollout_batch_size)
        if self._per_rollout < 1:
            raise ConfigError(
                f"plugins.replay.share {chosen.share} of --rollout-batch-size {args.rollout_batch_size} is less than"
                " one group; raise it"
            )
        self._draws = 0
        self._replayed = 0

    def begin_rollout(self, rollout_id: int, weight_version: int) -> None:
        """A new quota; groups that have grown too old go."""
        super().begin_rollout(rollout_id, weight_version)
        self._quota = self._per_rollout
        limit = weight_version - self._options.max_age
        self._kept = {index: kept for index, kept in self._kept.items() if _oldest(kept.group) >= limit}

    def add(self, groups: list[Group]) -> None:
        """Queue groups given back; a replayed one was not trained on, so it has its use and its place back."""
        fresh = []
        for group in groups:
            index = group[0].group_index
            if MARK not in group[0].metadata:
                fresh.append(group)
            elif index in self._kept:
                self._kept[index].uses -= 1
                self._kept[index].out = False
                self._quota += 1
        super().add(fresh)

    def take(self, num_groups: int) -> list[Group]:
        """Kept groups up to what is left of the rollout's quota, then waiting ones."""
        taken: list[Group] = []
        free = [i for i, kept in self._kept.items() if kept.uses < self._options.max_uses and not kept.out]
        if self._options.order == "newest":
            free.sort(key=lambda i: (-_oldest(self._kept[i].group), self._kept[i].uses, i))
        elif free:
            random.Random(f"{self.args.rollout_seed}/{self._draws}").shuffle(free)
            self._draws += 1
        for index in free[: max(0, min(self._quota, num_groups))]:
            kept = self._kept[index]
            kept.uses, kept.out = kept.uses + 1, True
            self._quota -= 1
            taken.append(_copy(kept.group))
            for sample in taken[-1]:
                sample.metadata[MARK] = kept.uses
        return taken + super().take(num_groups - len(taken))

    def observe(self, groups: list[Group], trained: bool) -> None:
        """Keep copies of what is trained on, if it can be trained on again."""
        for group in groups:
            if MARK in group[0].metadata:
                self._replayed += trained
                if group[0].group_index in self._kept:
                    self._kept[group[0].group_index].out = False
            elif trained and group[0].group_index is not None and _reusable(group):
                self._kept[group[0].group_index] = _Kept(_copy(group), 0)
        while len(self._kept) > self._options.capacity:
            del self._kept[next(iter(self._kept))]

    def take_metrics(self) -> dict[str, float]:
        """Replayed groups that were trained on since the last call, and groups kept."""
        replayed, self._replayed = self._replayed, 0
        return {"rollout/replayed_groups": float(replayed), "rollout/replay/kept_groups": float(len(self._kept))}

    def state_dict(self) -> dict[str, Any]:
        """Waiting and kept groups and counters."""
        kept = self._kept.values()
        return {
            **super().state_dict(),
            "kept": self.pack(entry.group for entry in kept),
            "uses": [entry.uses for entry in kept],
            "out": [entry.out for entry in kept],
            "quota": self._quota,
            "draws": self._draws,
            "replayed": self._replayed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        super().load_state_dict(state)
        groups = self.unpack(state["kept"])
        entries = zip(groups, state["uses"], state["out"], strict=True)
        self._kept = {g[0].group_index or 0: _Kept(g, uses, out) for g, uses, out in entries}
        self._quota, self._draws = int(state["quota"]), int(state["draws"])
        self._replayed = int(state["replayed"])


def _copy(group: Group) -> Group:
    return [Sample.from_dict(sample.to_dict()) for sample in group]


def _oldest(group: Group) -> int:
    """The oldest weight version of a sampled token."""
    return min((v for s in group for v in s.token_weight_versions if v >= 0), default=0)


def _reusable(group: Group) -> bool:
    """Every sample has its reward, and with it a response with log-probs and weight versions."""
    done = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
    return all(
        s.status in done and s.reward is not None and s.rollout_log_probs is not None and s.token_weight_versions
        for s in group
    )
