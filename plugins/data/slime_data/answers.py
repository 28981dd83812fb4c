"""Extract the answer of a sample, for votes: majority@k, `self_consistency`, `best_of_n`.

A reward that extracts an answer from the response offers the function as its trait
`extract_answer(sample) -> str | None`; `answer_extractor` finds it. Two answers are the same vote if they are the same
text, so the extractor must normalise. None is not a vote. Evaluation finds `votes` by the entry-point group
`slime.data`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from slime_core.config import EvalDataset
from slime_core.errors import ConfigError
from slime_core.plugins.resolve import absolute_spec, find, resolve
from slime_core.protocols import Args, RewardTraits, traits_of
from slime_core.sample import Sample, SampleStatus
from slime_core.workers.call import raised_at

__all__ = ["answer_extractor", "answer_of", "named_extractor", "votes"]
logger = logging.getLogger(__name__)

Extractor: TypeAlias = Callable[[Sample], "str | None"]
ERROR = "answer_error"
"""Key of the metadata of a sample whose extractor raised."""


def answer_extractor(args: Args, sample: Sample, spec: str | None = None, origin: str = "") -> Extractor | None:
    """Return the function that extracts the sample's answer: `spec`, else its reward's; None if the reward has none.

    Args:
        args: The run's settings.
        sample: Its own reward (`custom_rm_path`, `metadata["rm_type"]`) comes before the run's.
        spec: Name of a reward with an extractor, or the path of a function (sample) -> str | None.
        origin: Where `spec` comes from, for messages.

    Raises:
        ConfigError: `spec` is a reward without an extractor.
        PluginError: `spec`, or the reward, cannot be found or loaded.
    """
    if spec:
        return named_extractor(absolute_spec(spec), origin)
    own = sample.custom_rm_path or sample.metadata.get("custom_rm_path") or sample.metadata.get("rm_type")
    reward = own or args.custom_rm_path or args.rm_type
    return _of_reward(absolute_spec(str(reward))) if reward else None


@functools.lru_cache(maxsize=64)
def named_extractor(spec: str, origin: str = "") -> Extractor:
    """Return the extractor that `spec` names. Raises the errors of `answer_extractor`."""
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
    """Return the sample's answer; None for a failed or aborted sample, and (with a warning) if the extractor raises."""
    if sample.status in (SampleStatus.FAILED, SampleStatus.ABORTED):
        return None
    try:
        answer = extract(sample)
    except Exception as error:  # an unreadable response must not end the run, as for rewards
        reason = f"{type(error).__name__}: {error} (at {raised_at(error)})"
        sample.metadata[ERROR] = reason
        logger.warning("sample %s: its answer cannot be extracted: %s", sample.index, reason)
        return None
    return None if answer is None else str(answer)


def votes(args: Args, dataset: EvalDataset, samples: Sequence[Sample]) -> list[str | None] | None:
    """Return the samples' answers; None unless every answer can be extracted."""
    origin = f"evaluation data set {dataset.name!r}: answer_path"
    extractors = [answer_extractor(args, sample, dataset.answer_path, origin) for sample in samples]
    if None in extractors:
        return None
    return [answer_of(s, extract) for s, extract in zip(samples, extractors) if extract is not None]
