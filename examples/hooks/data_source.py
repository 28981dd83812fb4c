"""A data source of your own: sums that are made up, not read.

    slime train --config demo.yaml --data-source-path examples/hooks/data_source.py

`get_samples(n)` returns n groups of `--n-samples-per-prompt` samples; groups that a rollout gives back (surplus,
unfinished ones) come in through `add_samples` and go out first. With `state_dict` and `load_state_dict` the cursor is
part of every checkpoint, so a resumed run goes on with the next sum; THUDM/slime's `save(rollout_id)` and
`load(rollout_id)` are called instead where these are missing.
"""

from __future__ import annotations

import random
from typing import Any

from slime_core import Group, Sample


class DataSource:
    """Endless sums; the same ones for the same `--rollout-seed`."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.asked = 0
        self.waiting: list[Group] = []

    def get_samples(self, num_samples: int) -> list[Group]:
        """`num_samples` groups, those given back first."""
        returned, self.waiting = self.waiting[:num_samples], self.waiting[num_samples:]
        return [*returned, *(self._make() for _ in range(num_samples - len(returned)))]

    def add_samples(self, samples: list[Group]) -> None:
        """Groups to be drawn again."""
        self.waiting.extend(samples)

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"asked": self.asked, "waiting": [[s.to_dict() for s in group] for group in self.waiting]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.asked = state["asked"]
        self.waiting = [[Sample.from_dict(s) for s in group] for group in state["waiting"]]

    def _make(self) -> Group:
        rng = random.Random(f"{self.args.rollout_seed} {self.asked}")
        a, b = rng.randrange(10), rng.randrange(10)
        number, size = self.asked, self.args.n_samples_per_prompt
        self.asked += 1
        return [
            Sample(
                group_index=number, index=number * size + i, prompt=[{"role": "user", "content": f"{a}+{b}=?"}],
                label=str(a + b), metadata={"source_name": "sums"},
            )
            for i in range(size)
        ]  # fmt: skip
