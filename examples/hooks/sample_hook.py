"""Between generation and reward: look at each sample, change it, or replace it.

    slime train --config demo.yaml --rollout-sample-hook-path examples/hooks/sample_hook.py \
        --rollout-sample-hook-path examples/hooks/sample_hook.py:note_origin

The flag may be repeated; hooks run in the order given. A hook is plain or async, returns a Sample or None (keep the one
it got), and may declare `rollout_id` and `evaluation`. Every finished sample is seen once: fan-out siblings one by one,
a sample of a partial rollout when it is finished, failed ones never. One that changes what the sample is trained on
(tokens, log-probs, mask, ...) declares it, or the sample fails. A plain hook holds up everything else while it
runs; one that waits for something must be async.
"""

from __future__ import annotations

from typing import Any

from slime_core import EditTraits, Sample, declares


@declares(EditTraits(edits_samples=True))
def sample_hook(args: Any, sample: Sample) -> None:
    """Do not train on the last token of an answer that was cut: it was not the model's choice to stop there."""
    if sample.status == Sample.Status.TRUNCATED and sample.loss_mask and sum(sample.loss_mask) > 1:
        sample.loss_mask[-1] = 0


async def note_origin(args: Any, sample: Sample, *, rollout_id: int, evaluation: bool) -> Sample:
    """Leave a note that the reward, the log function and the saved samples can read."""
    sample.metadata["origin"] = f"{'evaluation' if evaluation else 'rollout'} {rollout_id}"
    return sample
