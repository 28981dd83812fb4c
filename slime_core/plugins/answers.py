"""A sample -> the answer it gives, for votes (majority@k, `self_consistency`, `best_of_n`).

A reward that reads an answer out of the response offers that as its trait `extract_answer(sample) -> str | None`;
`answer_extractor` finds it. Two answers are the same vote when they are the same text, so normalising is the
extractor's work, and None is no vote.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TypeAlias

from slime_core.errors import ConfigError
from slime_core.plugins.boundary import raised_at
from slime_core.plugins.resolve import absolute_spec, find, resolve
from slime_core.protocols import Args, RewardTraits, traits_of
from slime_core.sample import Sample, SampleStatus

logger = logging.getLogger(__name__)

Extractor: TypeAlias = Callable[[Sample], "str | None"]
ERROR = "answer_error"
"""Key of the metadata of a sample whose extractor raised."""


def answer_extractor(args: Args, sample: Sample, spec: str | None = None, origin: str = "") -> Extractor | None:
    """What extracts the sample's answer: `spec`, else its reward's; None where its reward offers none.

    Args:
        args: The run's settings.
        sample: Its own reward (`custom_rm_path`, `metadata["rm_type"]`) comes before the run's.
        spec: Name of a reward that offers it, or the path of a function (sample) -> str | None.
        origin: Where `spec` comes from, for messages.

    Raises:
        ConfigError: `spec` is a reward that offers none.
        PluginError: `spec`, or the reward, cannot be found or loaded.
    """
    if spec:
        return named_extractor(absolute_spec(spec), origin)
    own = sample.custom_rm_path or sample.metadata.get("custom_rm_path") or sample.metadata.get("rm_type")
    reward = own or args.custom_rm_path or args.rm_type
    return _of_reward(absolute_spec(str(reward))) if reward else None


@functools.lru_cache(maxsize=64)
def named_extractor(spec: str, origin: str = "") -> Extractor:
    """The extractor that `spec` names. Raises as `answer_extractor`."""
    if find("rewards", spec, origin=origin) is None:
        function: Extractor = resolve("functions", spec, origin=origin).obj
        return function
    found = _of_reward(spec)
    if found is None:
        raise ConfigError(
            f"{origin or 'answer'}: the reward {spec!r} offers no extract_answer; name a reward that does, or the path"
            " of a function (sample) -> str | None"
        )
    return found


@functools.lru_cache(maxsize=64)
def _of_reward(spec: str) -> Extractor | None:
    return traits_of(resolve("rewards", spec).obj, RewardTraits).extract_answer


def answer_of(sample: Sample, extract: Extractor) -> str | None:
    """The sample's answer; None of one that failed or was aborted, and where the extractor raises, which is told."""
    if sample.status in (SampleStatus.FAILED, SampleStatus.ABORTED):
        return None
    try:
        answer = extract(sample)
    except Exception as error:  # one response that it cannot read, like a reward's
        reason = f"{type(error).__name__}: {error} (at {raised_at(error)})"
        sample.metadata[ERROR] = reason
        logger.warning("sample %s: its answer cannot be extracted: %s", sample.index, reason)
        return None
    return None if answer is None else str(answer)
