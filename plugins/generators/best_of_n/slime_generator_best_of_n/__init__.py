"""N candidates of one prompt, and the best of them: best-of-n sampling, for evaluation.

The candidate that is returned is one that was sampled, token for token; what the others scored is in
`metadata["best_of_n"]`. Chosen by the run's own reward, which knows the label, the score is what an oracle would get
(pass@n of a 0/1 reward); only a `reward` that does not read the label, such as a reward model's, measures a method that
could be deployed.

Options (`plugins: {best_of_n: ...}`, or a data set's own `plugins`) are in `Options`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal

from pydantic import Field

from slime_core import (
    Args,
    GenerateContext,
    GenerateTraits,
    PluginOptions,
    Sample,
    SampleStatus,
    answer_extractor,
    answer_of,
    declares,
    options,
)
from slime_core.errors import ConfigError
from slime_generator_best_of_n.candidates import Candidate, candidate_rewards, sample_candidates

__all__ = ["Candidate", "Options", "candidate_rewards", "generate", "sample_candidates"]

_NAME = "best_of_n"


class Options(PluginOptions):
    """What a user may set: `--set plugins.best_of_n.n=16`."""

    n: int = Field(default=4, gt=0)
    """Candidates per sample."""
    generator: str = "single_turn"
    """Generate function that makes a candidate, by name or path."""
    reward: str | None = None
    """Reward that chooses, by name or path; the sample's, or the run's, when not given."""
    select: Literal["best", "weighted"] = "best"
    """best: the highest reward, the first of equal ones. weighted: rewards of equal answers are added up, and the best
    candidate of the answer with the highest sum wins."""
    answer: str | None = None
    """For weighted: what extracts a candidate's answer, a reward's name or the path of a function (sample) -> text."""
    in_training: bool = False
    """Allow it for samples that are trained on."""


def _check(args: Args, *, training: bool) -> None:
    """What the run asks before anything starts."""
    _refuse_training(options(args, _NAME, Options), training=training)


@declares(GenerateTraits(check=_check))
async def generate(
    args: Args, sample: Sample, sampling_params: dict[str, Any], *, context: GenerateContext
) -> Sample | list[Sample]:
    """The best of `n` candidates. ABORTED, with nothing of it kept, when a rollout's end interrupted one of them.

    Raises:
        ConfigError: It is used in training without `in_training`, or nothing scores or tells answers.
        PluginError: The generate function, reward or extractor cannot be found or loaded.
        Exception: What the generate function or the reward raised, when it raised for every candidate.
    """
    own = options(args, _NAME, Options)
    _refuse_training(own, training=not context.evaluation)
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
    for each in chosen.samples:
        each.session_id = sample.session_id
        each.metadata[_NAME] = {
            "n": own.n,
            "chosen": chosen.number,
            "candidates": [c.number for c in found],
            "rewards": scores,
            "response_tokens": sum(s.response_length for c in found for s in c.samples),
        }
    return chosen.samples if len(chosen.samples) > 1 else chosen.samples[0]


def _weighted(args: Args, own: Options, found: list[Candidate], rewards: list[float]) -> int:
    """Place of the best candidate of the answer whose rewards add up highest; the best of all where none answers."""
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


def _refuse_training(own: Options, *, training: bool) -> None:
    if training and not own.in_training:
        raise ConfigError(
            f"{_NAME} is for evaluation: trained on, its samples would be chosen ones, not the policy's. Give it to"
            " evaluation data sets (custom_generate_function_path in --eval-config), or type"
            f" --set plugins.{_NAME}.in_training=true"
        )
