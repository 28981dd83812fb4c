"""Invariants of training, always on: what does not hold is named with its likely cause, and ends nothing.

The hooks call `samples.py` where samples are generated and `batches.py` where they are trained on; both see numbers
only.
An incident is a warning and a line of `RUN/incidents.jsonl`, once for each check and process.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core import Args, Sample, hookimpl
from slime_core.errors import rollout_name
from slime_core.models.config import vocab_size_of
from slime_hooks.invariants.incident import FILE, Incident
from slime_hooks.invariants.samples import Kept, kept, sample_incidents, sampled_among, trained_as_sampled

if TYPE_CHECKING:
    from slime_hooks.invariants.batches import Batches

__all__ = ["FILE", "Incident", "Invariants"]

logger = logging.getLogger(__name__)

_vocab_size = functools.cache(vocab_size_of)
_AHEAD = 8
"""Rollouts that are remembered until they are trained on."""


class Invariants:
    """The hooks of one process."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._batches: Batches | None = None
        self._kept: dict[int, Kept] = {}
        """Rollout -> its samples, where they are generated and trained on in one process."""

    @hookimpl
    def slime_log_rollout(
        self, rollout_id: int, args: Args, samples: list[Sample], extra_metrics: dict[str, float]
    ) -> None:
        """Samples as they will become a batch."""
        if args.use_sampling_mask:
            extra_metrics |= sampled_among(samples, _vocab_size(args.hf_checkpoint))
        self._report(args, rollout_id, sample_incidents(args, samples))
        if not args.custom_convert_samples_to_train_data_path:
            self._kept[rollout_id] = kept(args, samples)
        self._kept.pop(rollout_id - _AHEAD, None)

    @hookimpl
    def slime_rollout_trained(self, args: Args, trained: Any) -> None:
        """The steps of a rollout, as the trainer took them."""
        from slime_hooks.invariants.batches import Batches, Trained

        self._batches = self._batches or Batches()
        batch, rest = trained.batch, (trained.tensors, list(trained.steps), trained.known)
        found = self._batches.incidents(Trained(args, trained.trainer, batch, trained.local, trained.indices, *rest))
        self._report(args, batch.rollout_id, found)
        known = self._kept.pop(batch.rollout_id, None)
        if known is not None:
            self._report(args, batch.rollout_id, trained_as_sampled(args, known, batch))

    def _report(self, args: Args, rollout_id: int, found: Iterable[Incident]) -> None:
        for incident in found:
            if incident.check in self._seen:
                continue
            self._seen.add(incident.check)
            logger.warning("%s: %s: %s", rollout_name(rollout_id), incident.cause, incident.numbers)
            line = json.dumps({"rollout_id": rollout_id, **incident._asdict()})
            with (Path(str(args.run_dir)) / FILE).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
