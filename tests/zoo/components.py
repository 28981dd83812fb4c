"""Rewards, generate functions and filters that bugs of the zoo are, or that a run needs to have them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from slime_testing_contracts.tiny import answer, digits

from slime_core.sample import Sample


def of_the_prompt(args: Any, sample: Any, **kwargs: Any) -> float:
    """Reads the prompt where it should read the answer."""
    return sum(map(ord, str(sample.prompt))) % 7 / 7


def always_right(args: Any, sample: Any, **kwargs: Any) -> float:
    """Gives the point where it cannot read the label."""
    return 1.0


def at_random(args: Any, sample: Any, **kwargs: Any) -> float:
    """Depends on anything but the answer."""
    return random.random()


def one_for_all(args: Any, samples: list[Any], **kwargs: Any) -> list[float]:
    """One number where each sample should have one, spread over the group."""
    return [digits(args, samples[0])] * len(samples)


async def as_they_come(args: Any, samples: list[Any], **kwargs: Any) -> list[float]:
    """Rewards in the order in which they were ready."""

    async def score(place: int, sample: Any) -> float:
        await asyncio.sleep(0.001 * (place % 2))
        return sum(map(ord, sample.response)) % 97 / 97

    return [await reward for reward in asyncio.as_completed([score(*pair) for pair in enumerate(samples)])]


def nearly_equal(args: Any, sample: Any, **kwargs: Any) -> float:
    """Sound, and differs by as little as is added to a deviation."""
    return 1 + 1e-5 * digits(args, sample)


def own_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Sound: whatever the user takes for an advantage."""
    rollout_data["advantages"] = rollout_data["returns"] = [mask * 0.5 for mask in rollout_data["loss_masks"]]


def penalty(args: Any, sample: Any, **kwargs: Any) -> float:
    """Sound, and below 0."""
    return digits(args, sample) - 1.5


def breaks(args: Any, sample: Any, **kwargs: Any) -> float:
    """Sound, but cannot score each answer."""
    if sample.index % 4 == 0:
        raise RuntimeError("the verifier did not answer")
    return digits(args, sample)


async def with_tool(args: Any, sample: Any, sampling_params: dict[str, Any], *, context: Any) -> Any:
    """Sound: a few tokens, the answer of a tool, a few tokens."""
    params = {**sampling_params, "max_new_tokens": 4}
    sample = await answer(args, sample, params, context=context)
    sample.append_response_tokens(args, [20, 21, 22, 23], trainable=False)
    output = await context.engine.generate(sample.tokens, params, session_id=sample.session_id)
    sample.append_response_tokens(args, output.token_ids, output.log_probs, True, output.meta_info, output.text)
    return sample


async def in_parts(args: Any, sample: Any, sampling_params: dict[str, Any], *, context: Any) -> Any:
    """Sound: every second sample becomes two, with one rollout id."""
    sample = await answer(args, sample, sampling_params, context=context)
    if sample.index % 2:
        return sample
    sample.rollout_id = sample.index
    return [sample, Sample.from_dict(sample.to_dict())]


def remove_one(args: Any, groups: list[list[Any]]) -> None:
    """Sound: the best sample of each group is not trained on."""
    for group in groups:
        max(group, key=lambda sample: sample.reward).remove_sample = True


def remove_some(args: Any, groups: list[list[Any]]) -> None:
    """Sound: one group is smaller than the others."""
    groups[0][0].remove_sample = True
