"""A model's size -> the learning rate and the size of an optimizer step with which models of that size learn.

For the warnings before a run (`check.py`) and for `slime why --learning`. Loads no torch. The rates are those of
docs/how-to/choose-settings.md: measured here for 0.3M and 135M parameters, from published recipes above.
"""

from __future__ import annotations

import math
from itertools import pairwise

_USUAL = ((3e5, 1e-4), (1.35e8, 2e-5), (5e8, 5e-6), (3e9, 2e-6), (7e9, 1e-6))
"""Parameters, and the rate for AdamW on all of them; straight lines between them in logarithms."""
_OF_ADAPTERS = 10.0
"""Rate of LoRA over that of full training."""
_RATIO_OF_RATE = 5.0
"""Update over weights, divided by the learning rate: 4 to 7 in the demo, 3 to 8 in SmolLM2-135M."""
_LARGE, _LARGE_RATE, _LARGEST_RATE = 100e6, 1e-3, 1e-2
COLD, HOT = 0.4, 1.25
"""Temperatures: the answers of a group are alike below, and noise above."""
TOO_SMALL, TOO_LARGE = 1 / 15, 15.0
"""Share of the usual rate, or of its update, from which a run learns nothing, or unlearns."""


def usual_rate(parameters: float, *, lora: bool = False) -> float:
    """The learning rate to begin with."""
    size = min(max(parameters, _USUAL[0][0]), _USUAL[-1][0])
    (small, first), (large, last) = next((a, b) for a, b in pairwise(_USUAL) if size <= b[0])
    share = math.log(size / small) / math.log(large / small)
    return math.exp((1 - share) * math.log(first) + share * math.log(last)) * (_OF_ADAPTERS if lora else 1.0)


def usual_update(parameters: float, *, lora: bool = False) -> float:
    """Norm of an optimizer step over that of the weights, at the usual rate."""
    return usual_rate(parameters, lora=lora) * _RATIO_OF_RATE


def complaint(rate: float, parameters: float, *, lora: bool = False, small: bool = True) -> str | None:
    """Explain why a rate is too large or (with `small`) too small for the model; None for one that may do."""
    usual = usual_rate(parameters, lora=lora)
    bound = _LARGE_RATE if parameters > _LARGE and not lora else _LARGEST_RATE
    if rate > bound:
        word = f"above {bound:g}, a model of {in_words(parameters)} parameters unlearns"
    elif small and 0 < rate < usual * TOO_SMALL:
        word = f"with it, a model of {in_words(parameters)} parameters hardly moves"
    else:
        return None
    return f"{word}; begin with --lr {usual:.0e} (docs/how-to/choose-settings.md)"


def in_words(parameters: float) -> str:
    """A number of parameters as people write it: 0.3M, 135M, 4B."""
    unit, letter = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{parameters / unit:.3g}{letter}"
