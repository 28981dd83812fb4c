"""Samples and groups as components see them, for the suites."""

from __future__ import annotations

from typing import Any

from slime_core.sample import Sample, SampleStatus


def answered_sample(
    prompt: str = "1+1=", response: str = "2", label: Any = "2", status: SampleStatus = SampleStatus.COMPLETED
) -> Sample:
    """A sample as a reward sees it, one token per character."""
    sample = Sample(group_index=0, index=0, prompt=prompt, label=label, tokens=[ord(c) for c in prompt])
    tokens = [ord(c) for c in response]
    sample.append_response_tokens(None, tokens, [-0.5] * len(tokens), text=response)
    sample.status = status
    return sample


def scored_group(rewards: list[float | None], group_index: int = 0) -> list[Sample]:
    """A group as a filter sees it."""
    group = []
    for position, reward in enumerate(rewards):
        sample = answered_sample()
        sample.group_index, sample.index, sample.reward = group_index, group_index * 100 + position, reward
        group.append(sample)
    return group
