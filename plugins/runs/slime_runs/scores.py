"""Scores of evaluated prompts: mean reward, pass@k and majority@k.

`slime_runs.metrics` averages them for `eval/...` (entry-point group `slime.metrics`); `slime eval` adds
intervals. n is the number of executions of *this* data set's prompts (fan-out siblings count as one execution, with the
mean of their rewards). Both estimates average over every choice of k of the n executions, so nothing is drawn at
random. A prompt with n = 4::

    answer    "7"  "7"  "8"  None      pass@1 2/4      majority@4 1: "7" has two votes of three
    correct    1    1    0    0        pass@2 5/6      majority@2 1/2: 7 7 wins, 7 8 is a tie, None does not vote
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from slime_core.sample.types import executions, mean

__all__ = ["Prompt", "data_sets", "eval_scores", "majority_at_k", "pass_at_k", "prompts_of", "score_values", "usual_ks"]

CORRECT = 1
"""The reward of a correct answer."""

_SCORE = re.compile(r"eval/([^/]+?)(?P<more>-(truncated_ratio|stderr|(pass|majority)@\d+))?")
"""A metric of a data set as a whole: its mean reward, or `more` about it."""


class Prompt(NamedTuple):
    """The executions of a prompt."""

    rewards: list[float]
    """Rewards, [n]."""
    answers: list[str | None] | None
    """Extracted answers, [n]; an entry is None if a response has no answer. None: no answers were extracted."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate of solving a prompt in k tries: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021).

    Raises:
        ValueError: k is larger than the number of samples.
    """
    if k > num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, got {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_at_k(answers: Sequence[str | None], correct: Sequence[float], k: int) -> float:
    """Return the correctness of the commonest of k answers, averaged exactly over every choice of k of n samples.

    The vote of Wang et al., "Self-Consistency Improves Chain of Thought Reasoning in Language Models" (2022). Answers
    with equally many votes share the win. Samples without an answer do not vote; if none of the k samples votes, the
    result is 0. The correctness of an answer is the mean over the samples that gave it.

    Args:
        answers: Answers, [n].
        correct: 1 or 0 for each answer, [n].
        k: Number of samples that vote.

    Raises:
        ValueError: k is larger than n.
    """
    n = len(answers)
    if k > n:
        raise ValueError(f"majority@{k} needs at least {k} samples, got {n}")
    votes = Counter(a for a in answers if a is not None)
    gained: dict[str, list[float]] = defaultdict(list)
    for answer, value in zip(answers, correct, strict=True):
        if answer is not None:
            gained[answer].append(value)
    silent = n - votes.total()
    if k == n:
        most = max(votes.values(), default=0)
        return mean([mean(gained[a]) for a, count in votes.items() if count == most]) if votes else 0.0
    result = 0.0
    for answer, count in votes.items():
        worth = mean(gained[answer])
        if worth:
            others = [c for a, c in votes.items() if a != answer]
            result += worth * float(Fraction(_wins(count, others, silent, k), math.comb(n, k)))
    return result


def _wins(own: int, others: Sequence[int], silent: int, k: int) -> Fraction:
    """Count the choices of k samples that an answer with `own` samples wins; a tie of t + 1 answers is 1 / (t + 1)."""
    total = Fraction(0)
    for votes in range(1, min(own, k) + 1):
        free = silent + sum(c for c in others if c < votes)  # can neither beat it nor tie with it
        ways = {(0, 0): 1}
        """(samples taken of rivals, rivals with exactly `votes`) -> number of choices."""
        for count in (c for c in others if c >= votes):
            following: dict[tuple[int, int], int] = defaultdict(int)
            for (taken, ties), number in ways.items():
                for more in range(min(votes, k - votes - taken) + 1):
                    following[taken + more, ties + (more == votes)] += number * math.comb(count, more)
            ways = following
        of_ties: dict[int, int] = defaultdict(int)
        for (taken, ties), number in ways.items():
            of_ties[ties] += number * math.comb(free, k - votes - taken)
        total += math.comb(own, votes) * sum((Fraction(w, ties + 1) for ties, w in of_ties.items()), Fraction(0))
    return total


def usual_ks(n: int) -> list[int]:
    """Return 1, 2, 4, ... up to n, and n itself."""
    return sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n} - {0})


def prompts_of(columns: Mapping[str, Any]) -> list[Prompt]:
    """Return the prompts of a data set, in the order of their first samples.

    Args:
        columns: An evaluation's `rewards`, `samples` and if known `answers`, each [n]. Without samples, rewards cannot
            be assigned to prompts, and the result is empty.
    """
    rewards, samples = columns["rewards"], columns.get("samples") or []
    answers = columns.get("answers")
    if len(samples) != len(rewards):
        return []
    place = {id(sample): i for i, sample in enumerate(samples)}
    found: dict[int | None, Prompt] = {}
    for siblings in executions(samples):
        prompt = found.setdefault(siblings[0].group_index, Prompt([], None if answers is None else []))
        prompt.rewards.append(mean([float(rewards[place[id(s)]]) for s in siblings]))
        if prompt.answers is not None and answers is not None:
            given = [answers[place[id(s)]] for s in reversed(siblings)]
            prompt.answers.append(next((a for a in given if a is not None), None))
    return list(found.values())


def score_values(columns: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return `reward`, `pass@k` and `majority@k` of a data set, each [prompts]; their means are its scores.

    The values of k are `columns["ks"]`, else `usual_ks` of the smallest prompt; a k beyond the executions of the
    smallest prompt is left out. majority@k needs k > 1 and `columns["answers"]`.
    """
    prompts = prompts_of(columns)
    if not prompts:
        return {}
    smallest = min(len(p.rewards) for p in prompts)
    ks = [k for k in columns.get("ks") or usual_ks(smallest) if k <= smallest]
    values = {"reward": [mean(p.rewards) for p in prompts]}
    correct = [[float(r == CORRECT) for r in p.rewards] for p in prompts]
    for k in ks:
        values[f"pass@{k}"] = [pass_at_k(len(c), int(sum(c)), k) for c in correct]
    for k in ks:
        if k > 1 and all(p.answers is not None for p in prompts):
            values[f"majority@{k}"] = [majority_at_k(p.answers or (), c, k) for p, c in zip(prompts, correct)]
    return values


def eval_scores(columns: Mapping[str, Any]) -> dict[str, float]:
    """Return the means of `pass@k` and `majority@k`, and `stderr`, the standard error of the mean reward of prompts."""
    values = score_values(columns)
    rewards = values.pop("reward", [])
    found = {name: mean(of) for name, of in values.items()}
    return found | ({"stderr": statistics.stdev(rewards) / math.sqrt(len(rewards))} if len(rewards) > 1 else {})


def data_sets(metrics: Iterable[str]) -> list[str]:
    """Return the names of the evaluation data sets that have a mean reward among the metrics, sorted."""
    found = map(_SCORE.fullmatch, metrics)
    return sorted({score[1] for score in found if score and not score["more"]})
