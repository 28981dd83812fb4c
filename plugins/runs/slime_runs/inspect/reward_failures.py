"""Save the calls of rewards that failed, with what is needed to reproduce them (`slime rewards replay`).

`rollout.reward` finds the log by the entry-point group `slime.failures`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_core.data.dumps import to_json
from slime_core.files import replace_file
from slime_core.plugins.adapters import RewardCaller
from slime_core.protocols import Args
from slime_core.sample import Sample
from slime_core.secrets import hidden_values

logger = logging.getLogger(__name__)

DIRECTORY = "failures"
MAX_SAVED = 100
"""Maximum number of saved failures per run directory."""
FORMAT = "slime reward failure 1"

_SETTINGS = (
    "rm_type", "custom_rm_path", "reward_key", "eval_reward_key", "group_rm", "rm_url", "rm_timeout",
    "custom_reward_post_process_path", "plugin_dir", "seed",
)  # fmt: skip
"""Settings that affect a reward; the user's own (`custom:`) and plugin options are saved as well."""


class FailureLog:
    """Saves failed calls below a run directory, with all data to reproduce them; without a directory it counts them.

    `slime rewards replay FILE` reads a file. A reward that always fails does not fill the disk: further failures are
    only counted.
    """

    def __init__(self, args: Args) -> None:
        self.args = args
        run_dir = args.run_dir
        self.directory = Path(run_dir) / DIRECTORY if run_dir else None
        self.num_failed = 0
        """Number of failed calls."""
        self._num_saved: int | None = None

    def save(
        self,
        samples: Sequence[Sample],
        scorer: RewardCaller,
        error: BaseException,
        *,
        evaluation: bool,
        rollout_id: int | None,
        args: Args | None = None,
    ) -> str | None:
        """Write the file of one failed call, before its samples are marked. `args`: the call's, if not the run's.

        Returns:
            The file's path, or None if it was not saved (no run directory, limit reached, full disk).
        """
        self.num_failed += 1
        if self.directory is None:
            return None
        if self._num_saved is None:
            self._num_saved = sum(1 for _ in self.directory.glob("reward-*.json"))
        if self._num_saved >= MAX_SAVED:
            if self._num_saved == MAX_SAVED:
                logger.warning("%s holds %d failed scores; further ones are not saved", self.directory, MAX_SAVED)
                self._num_saved += 1
            return None
        path = self.directory / file_name(samples[0], evaluation, rollout_id)
        record = {
            "format": FORMAT,
            "replay": f"slime rewards replay {path}",
            "error": {
                "where": scorer.label,
                "error": f"{type(error).__name__}: {error}",
                "traceback": getattr(error, "worker_traceback", None) or None,
            },
            "component": {"spec": scorer.spec, **scorer.provenance},
            "rollout_id": rollout_id,
            "evaluation": evaluation,
            "args": reward_settings(self.args if args is None else args),
            "samples": [sample.to_dict() for sample in samples],
        }
        try:
            self.directory.mkdir(exist_ok=True)
            is_new = not path.exists()
            replace_file(path, to_json(hidden_values(record), f"sample {samples[0].index}"))
        except Exception as failure:  # the sample has already failed; a failed save must not end the run
            logger.warning("cannot save the failed score %s: %s", path, failure)
            return None
        self._num_saved += is_new
        return str(path)


def file_name(sample: Sample, evaluation: bool, rollout_id: int | None) -> str:
    """Return `reward-<rollout>-<sample index>.json`; evaluation adds the data set's name, since indices repeat."""
    rollout = "none" if rollout_id is None else str(rollout_id)
    index = "none" if sample.index is None else str(sample.index)
    if not evaluation:
        return f"reward-{rollout}-{index}.json"
    name = re.sub(r"[^A-Za-z0-9_.]+", "_", str(sample.metadata.get("source_name", "")))
    return f"reward-eval{rollout}-{name}-{index}.json"


def reward_settings(args: Args) -> dict[str, Any]:
    """Return the settings that a reward may depend on, except values that JSON cannot represent."""
    values = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None}
    values |= {"plugins": args.plugins, **(args.model_extra or {})}
    kept = {}
    for name, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            continue
        if value is not None:
            kept[name] = value
    return kept
