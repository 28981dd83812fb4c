"""Evaluated samples -> what each prompt scored: mean reward, pass@k, majority@k. Pure functions, standard library.

`rollout.metrics` averages them for `eval/...`, `slime eval` adds intervals. N is the number of executions of *this*
data set's prompts (fan-out siblings are one, with the mean of their rewards), and both estimates average over every
choice of k of the n, so nothing is drawn at random. One prompt with n = 4::

    answer    "7"  "7"  "8"  None      pass@1 2/4      majority@4 1: "7" has two votes of three
    correct    1    1    0    0        pass@2 5/6      majority@2 1/2: 7 7 wins, 7 8 is a tie, None does not vote

Rewards are finite numbers here: a sample that failed, or got anything else for a reward, counts as 0 before.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from slime_core.fan_out import executions, mean

CORRECT = 1
"""The reward of a correct answer."""


class Prompt(NamedTuple):
    """One prompt's executions."""

    rewards: list[float]
    """[n]."""
    answers: list[str | None] | None
    """[n] what each answered; None of one that names no answer. None as a whole: nobody extracted any."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of solving a prompt within k tries: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021).

    Raises:
        ValueError: k is larger than the number of samples.
    """
    if k > num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, got {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_at_k(answers: Sequence[str | None], correct: Sequence[float], k: int) -> float:
    """How correct the commonest of k answers is, averaged over every choice of k of the n samples; exact.

    The vote of Wang et al., "Self-Consistency Improves Chain of Thought Reasoning in Language Models" (2022). Answers
    with equally many votes share the win. Samples without an answer do not vote; when none of the k votes, the
    result is 0. An answer is as correct as the samples that gave it are on average.

    Args:
        answers: [n].
        correct: [n] 1 or 0.
        k: How many vote.

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
    """Choices of k samples in which an answer with `own` of them wins; a tie of t + 1 answers counts 1 / (t + 1)."""
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
    """1, 2, 4, ... and n itself."""
    return sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n} - {0})


def prompts_of(columns: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of one data set, in the order of their first samples.

    Args:
        columns: An evaluation's `rewards`, `samples` and where known `answers`, each [n]. Without samples nobody knows
            which rewards are one prompt's: there are none.
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
    """`reward`, `pass@k` and `majority@k` of one data set, each [prompts]; their means are the data set's scores.

    k is `columns["ks"]` as far as every prompt has so many executions, else `usual_ks` of the smallest prompt.
    majority@k is there for k > 1, where `columns["answers"]` are.
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
