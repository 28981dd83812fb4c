"""What users' sources and rollout functions may hand over, and what is said of the rest."""

from __future__ import annotations

import math

import pytest
from slime_runs.metrics import eval_metrics

from slime_core.errors import RolloutError
from slime_core.rollout.pool import drawn_groups
from slime_core.rollout.stage import eval_output, train_output
from slime_core.sample import RolloutFnTrainOutput, Sample


def _groups(n: int, size: int = 2) -> list[list[Sample]]:
    return [[Sample() for _ in range(size)] for _ in range(n)]


def test_samples_without_numbers_get_unique_ones_that_a_resumed_run_gets_again() -> None:
    def numbers(rollout_id: int, drawn: int) -> list[tuple[int, int]]:
        groups = drawn_groups(_groups(3), 3, rollout_id, drawn)
        return [(s.group_index, s.index) for g in groups for s in g]

    first, later = numbers(0, 0), numbers(0, 3)
    assert numbers(0, 0) == first
    assert len({i for _, i in first + later + numbers(1, 0)}) == 18
    assert len({g for g, _ in first}) == 3


@pytest.mark.parametrize(
    ("answer", "found"),
    [(None, "NoneType"), ([], "returned 0"), (_groups(1), "returned 1"), ([Sample(), Sample()], "a list of 2 Sample"),
     ([[], []], "a list of 2 list"), ([["text"], ["text"]], "a group held a list of 1 str")],
)  # fmt: skip
def test_bad_answers_of_a_data_source(answer, found: str) -> None:
    with pytest.raises(RolloutError, match=f"--data-source-path: get_samples\\(2\\).*{found}"):
        drawn_groups(answer, 2, 0, 0)


def test_a_group_whose_samples_share_an_index_is_refused() -> None:
    with pytest.raises(RolloutError, match="share an index"):
        drawn_groups([[Sample(index=1), Sample(index=1)]], 1, 0, 0)


def test_rollout_functions_may_answer_with_groups_of_fan_out() -> None:
    a, b, c = Sample(index=0), Sample(index=1), Sample(index=2)
    assert train_output([[a, [b, c]]]).samples == [[a, b, c]]
    assert train_output(RolloutFnTrainOutput([a], {"x": 1.0})).metrics == {"x": 1.0}


@pytest.mark.parametrize("answer", [None, "text", {"a": 1}, [["text"]], [3]])
def test_bad_answers_of_a_rollout_function(answer) -> None:
    with pytest.raises(RolloutError, match="--rollout-function-path"):
        train_output(answer)


@pytest.mark.parametrize("answer", [None, [], {"held": [1, 2]}, {"held": {"truncated": []}}])
def test_bad_answers_of_an_eval_function(answer) -> None:
    with pytest.raises(RolloutError, match="--eval-function-path or --rollout-function-path: must return"):
        eval_output(answer)


@pytest.mark.parametrize("lost", [None, math.nan, math.inf, "1.0"])
def test_rewards_of_an_eval_function_that_are_no_numbers_count_as_failed(lost, caplog) -> None:
    samples = [Sample(index=i, group_index=0, reward=r, status="completed") for i, r in enumerate((1.0, lost))]
    told = {"rewards": [1.0, lost], "truncated": [False, False], "samples": samples}
    alone = {"rewards": [1.0, lost], "truncated": [False, False]}
    data = eval_output({"told": told, "alone": alone}).data
    metrics = eval_metrics(data)
    for name in ("told", "alone"):
        assert (metrics[f"eval/{name}"], metrics[f"eval/{name}/failed_ratio"]) == (0.5, 0.5)
    assert metrics["eval/told-pass@2"] == 1.0
    assert [s.status for s in samples] == [Sample.Status.COMPLETED, Sample.Status.FAILED]
    assert "1 of 2 rewards of 'told' are no finite numbers (the first is number 1" in caplog.text
