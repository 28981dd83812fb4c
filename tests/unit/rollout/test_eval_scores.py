from __future__ import annotations

import itertools
from collections import Counter
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_runs.metrics import eval_metrics
from slime_runs.scores import majority_at_k, prompts_of, score_values, usual_ks

from slime_core.sample import Sample

VOTES = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=8)


def vote(chosen: tuple[tuple[str | None, bool], ...], worth: dict[str, float]) -> float:
    counts = Counter(answer for answer, _ in chosen if answer is not None)
    winners = [a for a, n in counts.items() if n == max(counts.values())]
    return fmean(worth[a] for a in winners) if winners else 0.0


@given(votes=VOTES, data=st.data())
def test_majority_at_k_is_the_mean_over_all_choices_of_k(votes: list[tuple[str | None, bool]], data) -> None:
    k = data.draw(st.integers(1, len(votes)))
    worth = {a: fmean(float(c) for b, c in votes if b == a) for a in {a for a, _ in votes if a is not None}}
    expected = fmean(vote(chosen, worth) for chosen in itertools.combinations(votes, k))
    found = majority_at_k([a for a, _ in votes], [float(c) for _, c in votes], k)
    assert found == pytest.approx(expected)


def columns(n: int, prompts: int, **more: object) -> dict[str, object]:
    samples = [Sample(index=i, group_index=i // n, response="x") for i in range(n * prompts)]
    return {
        "rewards": [float(i % 2) for i in range(n * prompts)],
        "truncated": [False] * len(samples),
        "samples": samples,
        **more,
    }


def test_each_data_set_has_its_own_n_and_ks() -> None:
    sets = {"three": columns(3, 2, answers=list("ababab")), "one": columns(1, 4), "own": columns(6, 2, ks=[1, 3, 5])}
    metrics = eval_metrics(sets)
    assert {k for k in metrics if "@" in k} == {
        "eval/three-pass@1", "eval/three-pass@2", "eval/three-pass@3", "eval/three-majority@2",
        "eval/three-majority@3", "eval/one-pass@1", "eval/own-pass@1", "eval/own-pass@3", "eval/own-pass@5",
    }  # fmt: skip
    # rewards 0 1 0 | 1 0 1 of answers a b a | b a b: "a" is always wrong, "b" right
    assert metrics["eval/three-majority@3"] == 0.5
    assert usual_ks(6) == [1, 2, 4, 6]


def test_fan_out_siblings_are_one_execution_with_one_vote() -> None:
    samples = [Sample(group_index=0, rollout_id=5), Sample(group_index=0, rollout_id=5), Sample(group_index=0)]
    found = {"rewards": [1, 1, 0], "samples": samples, "answers": [None, "a", "b"]}
    (prompt,) = prompts_of(found)
    assert (prompt.rewards, prompt.answers) == ([1, 0], ["a", "b"])
    assert score_values(found)["pass@1"] == [0.5]
    assert score_values({"rewards": [1.0], "samples": []}) == {}
