"""Sample N candidates of a prompt and return one with the most common answer: self-consistency (Wang et al., 2022).

For evaluation. The returned candidate is a sampled response, token for token; the votes are in
`metadata["self_consistency"]`. Answers are compared as text, after the extractor's normalisation. A candidate without
an answer does not vote. The label is not used.

Options (`plugins: {self_consistency: ...}`, or a data set's own `plugins`) are in `Options`.
"""

from __future__ import annotations

from collections import Counter
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
from slime_generators.best_of_n import Candidate, choose, in_training, sample_candidates

_NAME = "self_consistency"


class Options(PluginOptions):
    """Options of the plugin: `--set plugins.self_consistency.n=16`."""

    n: int = Field(default=8, gt=0)
    """Candidates per sample."""
    generator: str = "single_turn"
    """Generate function that makes a candidate, as a name or path."""
    answer: str | None = None
    """Extractor of a candidate's answer: a reward's name, or the path of a function (sample) -> text or None. By
    default the sample's own reward, or the run's."""
    pick: Literal["first", "shortest", "likeliest"] = "first"
    """Candidate of the winning answer: the first sampled, the shortest response, or the highest mean log-prob."""
    in_training: bool = False
    """Allow the generator for samples that are trained on."""


def _check(args: Args, *, training: bool) -> None:
    """Check the options before anything starts."""
    if training and not options(args, _NAME, Options).in_training:
        raise in_training(_NAME)


@declares(GenerateTraits(check=_check))
async def generate(
    args: Args, sample: Sample, sampling_params: dict[str, Any], *, context: GenerateContext
) -> Sample | list[Sample]:
    """Return a candidate with the most common answer of `n`; among equally common answers, the first one sampled.

    If no candidate has an answer, `pick` chooses among all. Failed candidates count only if all failed. If a rollout's
    end interrupted a candidate, the sample is ABORTED and no candidate is kept.

    Raises:
        ConfigError: It is used in training without `in_training`, or there is no extractor of answers.
        PluginError: The generate function or the extractor cannot be found or loaded.
        Exception: The error of the generate function, if it raised for every candidate.
    """
    own = options(args, _NAME, Options)
    if not (context.evaluation or own.in_training):
        raise in_training(_NAME)
    extract = answer_extractor(args, sample, own.answer, f"plugins.{_NAME}.answer")
    if extract is None:
        raise ConfigError(
            f"plugins.{_NAME}.answer: nothing tells the candidates' answers; name a reward that does, or the path of"
            " a function (sample) -> str | None"
        )
    found = await sample_candidates(
        args, sample, sampling_params, context, num=own.n, generator=own.generator, origin=f"plugins.{_NAME}.generator"
    )
    if found is None:
        sample.reset_for_retry()
        sample.status = SampleStatus.ABORTED
        return sample
    found = [c for c in found if all(s.status != SampleStatus.FAILED for s in c.samples)] or found
    answers = [answer_of(candidate.samples[-1], extract) for candidate in found]
    votes = Counter(answer for answer in answers if answer is not None)
    winner = votes.most_common(1)[0][0] if votes else None  # of equal counts, the first one
    among = [candidate for candidate, answer in zip(found, answers) if answer == winner]
    chosen = among[0] if own.pick == "first" else min(among, key=_length if own.pick == "shortest" else _surprise)
    return choose(_NAME, sample, found, chosen, n=own.n, answer=winner, votes=dict(votes))


def _length(candidate: Candidate) -> int:
    return sum(s.response_length for s in candidate.samples)


def _surprise(candidate: Candidate) -> float:
    """Return the mean negative log-prob of the sampled tokens; infinite without sampled tokens."""
    log_probs = [
        p
        for s in candidate.samples
        for p, sampled in zip(s.rollout_log_probs or (), s.loss_mask or [1] * s.response_length)
        if sampled
    ]
    return -sum(log_probs) / len(log_probs) if log_probs else float("inf")
