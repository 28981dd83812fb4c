"""Best-of-n sampling for evaluation: sample N candidates of a prompt and return the best.

The returned candidate is one that was sampled, token for token; the scores of the others are in
`metadata["best_of_n"]`. If the run's own reward chooses, it reads the label, so the score is that of an oracle (pass@n
of a 0/1 reward). Only a `reward` that does not read the label, such as a reward model's, measures a method that could
be deployed.

Options (`plugins: {best_of_n: ...}`, or a data set's own `plugins`) are in `Options`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal

from pydantic import Field
from slime_data.answers import answer_extractor, answer_of

from slime_core import (
    Args,
    GenerateContext,
    GenerateTraits,
    PluginOptions,
    Sample,
    SampleStatus,
    declares,
    options,
)
from slime_core.errors import ConfigError
from slime_generators.best_of_n.candidates import Candidate, candidate_rewards, choose, in_training, sample_candidates

__all__ = ["Candidate", "Options", "candidate_rewards", "choose", "generate", "in_training", "sample_candidates"]

_NAME = "best_of_n"


class Options(PluginOptions):
    """The user's settings, such as `--set plugins.best_of_n.n=16`."""

    n: int = Field(default=4, gt=0)
    """Number of candidates per sample."""
    generator: str = "single_turn"
    """Generate function that makes a candidate, by name or path."""
    reward: str | None = None
    """Reward that chooses, by name or path; by default the reward of the sample or of the run."""
    select: Literal["best", "weighted"] = "best"
    """Rule of the choice. best: the highest reward, the first of equal candidates. weighted: rewards of equal answers
    are added up, and the best candidate of the answer with the highest sum wins."""
    answer: str | None = None
    """Extractor of a candidate's answer for weighted: name of a reward or path of a function (sample) -> text."""
    in_training: bool = False
    """Allow best-of-n for samples that are trained on."""


def _check(args: Args, *, training: bool) -> None:
    """Check the options before the run starts."""
    if training and not options(args, _NAME, Options).in_training:
        raise in_training(_NAME)


@declares(GenerateTraits(check=_check))
async def generate(
    args: Args, sample: Sample, sampling_params: dict[str, Any], *, context: GenerateContext
) -> Sample | list[Sample]:
    """Return the best of `n` candidates, or an ABORTED sample without tokens if the rollout's end interrupted any.

    Raises:
        ConfigError: It is used in training without `in_training`, or there is no reward or no answer extractor.
        PluginError: The generate function, reward or extractor cannot be found or loaded.
        Exception: The generate function or the reward raised this exception for every candidate.
    """
    own = options(args, _NAME, Options)
    if not (context.evaluation or own.in_training):
        raise in_training(_NAME)
    origin = f"plugins.{_NAME}"
    found = await sample_candidates(
        args, sample, sampling_params, context, num=own.n, generator=own.generator, origin=f"{origin}.generator"
    )
    if found is None:
        sample.reset_for_retry()
        sample.status = SampleStatus.ABORTED
        return sample
    rewards = await candidate_rewards(args, found, own.reward, context, f"{origin}.reward")
    if own.select == "weighted":
        place = _weighted(args, own, found, rewards)
    else:
        place = max(range(len(found)), key=lambda i: rewards[i])
    chosen = found[place]
    scores = [None if r == float("-inf") else r for r in rewards]
    return choose(_NAME, sample, found, chosen, n=own.n, rewards=scores)


def _weighted(args: Args, own: Options, found: list[Candidate], rewards: list[float]) -> int:
    """Return the index of the best candidate of the answer with the highest reward sum, or of all without answers."""
    sums: dict[str, float] = defaultdict(float)
    members: dict[str, list[int]] = defaultdict(list)
    for i, candidate in enumerate(found):
        last = candidate.samples[-1]
        extract = answer_extractor(args, last, own.answer, f"plugins.{_NAME}.answer")
        if extract is None:
            raise ConfigError(
                f"plugins.{_NAME}.select weighted: the sample's reward tells no answers; set plugins.{_NAME}.answer"
            )
        answer = answer_of(last, extract)
        if answer is not None and rewards[i] != float("-inf"):
            sums[answer] += rewards[i]
            members[answer].append(i)
    among = members[max(sums, key=lambda a: sums[a])] if sums else range(len(found))
    return max(among, key=lambda i: rewards[i])
