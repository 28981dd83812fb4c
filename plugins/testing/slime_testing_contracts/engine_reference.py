"""The reference for an engine's answers: the tiny model of the tests in `transformers`, in float32.

The engine suites compute log-probs of given tokens with it. The reference never samples; its distribution decides
whether a token could have been sampled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from slime_testing_contracts.tiny import tiny_model


def weights(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Return the weights of the tiny model by HF name, multiplied by `scale`."""
    from slime_core.models.hf_io import read_weights

    return {name: tensor * scale for name, tensor in read_weights(tiny_model())}


@functools.cache
def model(scale: float = 1.0) -> Any:
    """Return the tiny model in `transformers`, its weights multiplied by `scale`; do not change it."""
    from transformers import AutoModelForCausalLM

    made: Any = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32, attn_implementation="eager")
    made.eval()
    missing, unexpected = made.load_state_dict(weights(scale), strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    made.tie_weights()
    return made


@functools.cache
def tokenizer() -> Any:
    """Return the tokenizer of the tiny model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model())


def distributions(
    prompt: Sequence[int], answer: Sequence[int], *, scale: float = 1.0, temperature: float = 1.0
) -> torch.Tensor:
    """Return [answer, vocabulary] float64 log-probs, by one float32 forward pass over prompt and answer."""
    with torch.no_grad():
        logits = model(scale)(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, dim=-1)


def log_probs(
    prompt: Sequence[int], answer: Sequence[int], *, scale: float = 1.0, temperature: float = 1.0
) -> torch.Tensor:
    """Return [answer] float64 log-probs of the tokens of an answer."""
    found = distributions(prompt, answer, scale=scale, temperature=temperature)
    return found.gather(1, torch.tensor(list(answer), dtype=torch.long)[:, None])[:, 0]


def continued_log_probs(
    prompt: Sequence[int], answer: Sequence[int], kept: int, *, old: float, new: float, temperature: float = 1.0
) -> torch.Tensor:
    """Return [answer - kept] log-probs of the tokens after the first `kept`, as from an engine paused in place.

    The new weights sampled these tokens, while the keys and values of all earlier tokens are from the old weights.
    """
    ids = torch.tensor([[*prompt, *answer]])
    before = len(prompt) + kept - 1
    with torch.no_grad():
        cache = model(old)(ids[:, :before], use_cache=True).past_key_values
        logits = model(new)(ids[:, before:], past_key_values=cache).logits[0, :-1]
    found = torch.log_softmax(logits.double() / temperature, dim=-1)
    return found.gather(1, ids[0, before + 1 :, None])[:, 0]
