"""Reward by a fair coin, 0.0 or 1.0: a control that shows what a run learns from noise.

The coin depends on `--rollout-seed` and the sample's index, so a resumed run and a replay get the same rewards; the
response has no effect. For samples without an index (outside a run) the coin depends on their texts.
"""

from __future__ import annotations

import hashlib

from slime_core import Args, RewardTraits, Sample, declares


@declares(RewardTraits(execution="inline"))
def reward(args: Args, sample: Sample) -> float:
    """Return 0.0 or 1.0, each with probability 1/2 over the indices."""
    name = (sample.group_index, sample.index) if sample.index is not None else (str(sample.prompt), sample.response)
    text = repr((args.rollout_seed, *name))
    return float(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=1).digest()[0] & 1)
