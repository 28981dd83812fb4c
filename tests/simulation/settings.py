"""The settings of a simulated run: drawn from its seed, small, and of every kind that changes how groups travel."""

from __future__ import annotations

import copy
import functools
import json
import random
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

MODES = ("sync", "one-step", "full")


@dataclass(frozen=True, kw_only=True)
class SimulationSettings:
    """What `args` and the simulated world are made of; the names are those of the flags where there is one."""

    mode: str = "sync"
    """"sync", "one-step" or "full"."""
    num_rollout: int = 4
    num_rows: int = 7
    """Prompts of the data set, so that a run sees its end."""
    rollout_shuffle: bool = False
    rollout_batch_size: int = 2
    n_samples_per_prompt: int = 2
    over_sampling_batch_size: int = 2
    partial_rollout: bool = False
    mask_offpolicy_in_partial_rollout: bool = False
    dynamic_sampling_on_exhausted: str = "keep"
    sglang_server_concurrency: int = 8
    save_interval: int = 1
    eval_interval: int | None = None
    group_timeout: float | None = None
    group_timeout_policy: str = "retry"
    keep_checkpoints: int | None = None
    update_weights_interval: int = 1
    async_buffer_groups: int | None = None
    max_staleness: int | None = None
    staleness_policy: str = "recycle"
    staleness_max_retries: int = 3
    eval_in_background: bool = False
    rollout_max_response_len: int = 12
    filtered: float = 0.0
    """Share of groups that the dynamic filter drops."""
    failing: float = 0.0
    """Share of samples whose generate function raises."""
    fan_out: float = 0.0
    """Share of samples that become two."""
    two_turns: float = 0.0
    """Share of samples that call the engine twice."""
    group_rm: bool = False
    train_seconds: float = 0.2
    """Of one rollout, about."""

    @classmethod
    def drawn(cls, rng: random.Random, mode: str = "sync") -> SimulationSettings:
        """One run's."""
        batch = rng.choice([1, 2, 2, 3, 4])
        found = cls(
            mode=mode,
            num_rollout=rng.randint(2, 4),
            num_rows=rng.randint(5, 12),
            rollout_shuffle=rng.random() < 0.3,
            rollout_batch_size=batch,
            n_samples_per_prompt=rng.choice([1, 1, 2, 3]),
            over_sampling_batch_size=batch + rng.choice([0, 0, 1, 3]),
            partial_rollout=rng.random() < 0.5,
            mask_offpolicy_in_partial_rollout=rng.random() < 0.3,
            dynamic_sampling_on_exhausted=rng.choice(["keep", "shrink"]),
            sglang_server_concurrency=rng.choice([1, 2, 4, 64]),
            save_interval=rng.choice([1, 1, 2]),
            eval_interval=rng.choice([None, None, 2]),
            group_timeout=rng.choice([None, None, 20.0]),
            group_timeout_policy=rng.choice(["retry", "substitute", "shrink"]),
            keep_checkpoints=rng.choice([None, 1, 2]),
            filtered=rng.choice([0.0, 0.0, 0.3]),
            failing=rng.choice([0.0, 0.0, 0.1]),
            fan_out=rng.choice([0.0, 0.0, 0.2]),
            two_turns=rng.choice([0.0, 0.3]),
            group_rm=rng.random() < 0.2,
            train_seconds=rng.choice([0.05, 0.5, 3.0]),
        )
        if mode == "sync":
            return found
        # A rollout generated ahead cannot have groups replaced; with partial rollouts some of its tokens are older.
        masks_only = mode == "one-step" and found.partial_rollout
        return replace(
            found,
            update_weights_interval=rng.choice([1, 1, 2]),
            async_buffer_groups=rng.choice([None, 1, 4]) if mode == "full" else None,
            max_staleness=rng.choice([None, 0, 1, 2]) if mode == "full" else rng.choice([None, 1, 2]),
            staleness_policy="mask" if masks_only else rng.choice(["recycle", "drop", "mask"]),
            staleness_max_retries=rng.choice([0, 1, 3]),
            eval_in_background=rng.random() < 0.5,
        )

    def args(self, run_dir: Path, load: bool) -> Any:
        """The run's `args`, as the command makes them."""
        rows = _prompt_file(self.num_rows)
        changes = {k: v for k, v in asdict(self).items() if k in _ARGS}
        changes |= {
            "async_training": self.mode != "sync", "async_mode": "full" if self.mode == "full" else "one-step",
            "prompt_data": str(rows), "run_dir": str(run_dir), "save": str(run_dir), "input_key": "input",
            "load": str(run_dir) if load else None, "rollout_timeout": 40.0, "rm_timeout": 10.0,
            "global_batch_size": self.n_samples_per_prompt * (1 if self.num_rows % 2 else self.rollout_batch_size),
            "dynamic_sampling_budget": 10, "num_steps_per_rollout": None,
        }  # fmt: skip
        args = copy.copy(_base())
        unknown = [name for name in changes if not hasattr(args, name)]
        assert not unknown, f"no settings: {unknown}"
        for name, value in changes.items():
            setattr(args, name, value)
        if args.async_buffer_groups is None:
            args.async_buffer_groups = args.rollout_batch_size
        return args

    def __str__(self) -> str:
        """What differs from the defaults."""
        default = asdict(SimulationSettings())
        return ", ".join(f"{k}={v!r}" for k, v in asdict(self).items() if v != default[k]) or "defaults"


_ARGS = frozenset(
    {
        "num_rollout", "rollout_shuffle", "rollout_batch_size", "n_samples_per_prompt", "over_sampling_batch_size",
        "partial_rollout", "mask_offpolicy_in_partial_rollout", "dynamic_sampling_on_exhausted",
        "sglang_server_concurrency", "save_interval", "eval_interval", "keep_checkpoints", "group_timeout",
        "group_timeout_policy", "update_weights_interval",
        "async_buffer_groups", "max_staleness", "staleness_policy", "staleness_max_retries", "eval_in_background",
        "rollout_max_response_len", "group_rm",
    }
)  # fmt: skip
_KEPT: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the process ends."""


@functools.cache
def _base() -> Any:
    """Parsed once: all the flags and rules cost more than a simulated run."""
    from slime_core.plugins.presets import load_settings

    argv = ["--hf-checkpoint", "simulated", "--prompt-data", "simulated.jsonl", "--rollout-batch-size", "2"]
    argv += ["--num-rollout", "1", "--rm-type", "simulated", "--rollout-max-response-len", "12", "--input-key", "input"]
    return load_settings(argv, command="train", env={}).args


@functools.cache
def _prompt_file(num_rows: int) -> Path:
    """Rows whose prompt tells their number."""
    if not _KEPT:
        _KEPT.append(tempfile.TemporaryDirectory(prefix="slime-simulation-"))
    path = Path(_KEPT[0].name) / f"prompts-{num_rows}.jsonl"
    path.write_text("".join(json.dumps({"input": f"row {i}", "label": str(i)}) + "\n" for i in range(num_rows)))
    return path
