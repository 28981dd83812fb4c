r"""A reward of your own: right answers score 1, less a little for every token they took.

    slime train --config demo.yaml --custom-rm-path examples/custom_reward.py
    slime train --config demo.yaml --custom-rm-path examples/custom_reward.py --config price.yaml

where `price.yaml` holds `custom: {token_price: 0.01}`; what stands below `custom` becomes attributes of `args`.

Called once per sample, in a worker process, as soon as the sample is generated. The answer may be cut, empty, or
nothing like what was asked for; that is a reward of 0, not an exception. An exception makes the sample FAILED, and it
is then not trained on. A label that cannot be read is one: `right_answers` raises it, and names the label.
"""

from __future__ import annotations

import re
from typing import Any

from slime_core import Sample, right_answers

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def reward(args: Any, sample: Sample) -> float:
    r"""1 - token_price * tokens, at least 0, when the last `\boxed{...}` is the label and the answer ended; else 0."""
    labels = right_answers(sample.label)
    answers = _BOXED.findall(sample.response)
    if sample.status != Sample.Status.COMPLETED or not answers or answers[-1] not in labels:
        return 0.0
    price = getattr(args, "token_price", 0.0)
    return max(0.0, 1.0 - price * sample.response_length)
